"""The kinds of objects that a sandbox can be made of; `pod` is the plain one."""
