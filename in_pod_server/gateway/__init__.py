"""Apps of a sandbox at hosts of their own, each request checked before it reaches one."""
