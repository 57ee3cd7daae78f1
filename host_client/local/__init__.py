"""A cluster and an image on this machine: the logic behind `scripts/cluster` and `scripts/image`."""
