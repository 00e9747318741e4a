"""The run page's own files. `dovetail ui` and the status API serve them."""
