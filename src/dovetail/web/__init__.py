"""The run page's own files, as `dovetail ui` and the status API serve them."""
