"""The agent-sandbox example's server as it is started there: `python3 -u /app/mcp_server.py`."""

from in_pod_server.blobs import main

if __name__ == "__main__":
    main()
