"""What makes a person's MCP client start podpipe: the entry, the files that hold it, a skill."""
