"""The life of a trainer rank: it joins, obeys the coordinator, and shows that it lives."""
