"""A client on mcp 1.x, which has a virtual environment of its own: makes the calls of a plan.

python client.py < plan.json        prints what came back
"""

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession, StdioServerParameters  # type: ignore[attr-defined,unused-ignore]
from mcp.client.stdio import stdio_client


async def main() -> None:
    """Make the calls one after the other; an argument may be a field of an earlier result."""
    plan = json.load(sys.stdin)
    command, *argv = plan["command"]
    parameters = StdioServerParameters(command=command, args=argv, env=plan["env"])
    results: list[dict[str, Any]] = []
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        for call in plan["calls"]:
            arguments = {
                name: results[value["from"]]["structuredContent"][value["field"]]
                if isinstance(value, dict) and "from" in value
                else value
                for name, value in call["arguments"].items()
            }
            result = await session.call_tool(call["tool"], arguments)
            results.append(result.model_dump(mode="json", by_alias=True, exclude_none=True))
    print(json.dumps({"tools": [tool.name for tool in tools], "results": results}))


if __name__ == "__main__":
    asyncio.run(main())
