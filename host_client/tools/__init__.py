"""The tools of the host server: a room for each kind, and `common` for what they share."""
