"""What the suite's scenarios call: tools, resources and prompts that podpipe itself does not have.

They are put on the product's own servers, so that what is tested is the way through them.
"""

# No `from __future__ import annotations`: the SDK evaluates these signatures.
import base64
import json
from typing import Any

import anyio
from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.server.mcpserver.tools import Tool
from mcp.types import (
    INVALID_PARAMS,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    Completion,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    TextContent,
    TextResourceContents,
)

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d"
        "49444154789c63606060f80f0001040100e26a6a3b0000000049454e44ae426082"
    )
).decode()
WAV = base64.b64encode(b"RIFF\x26\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0").decode()
STEP_SECONDS = 0.02

SCHEMA_2020 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def text(value: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=value)])


def embedded(uri: str, mime_type: str, value: str) -> EmbeddedResource:
    contents = TextResourceContents(uri=uri, mime_type=mime_type, text=value)
    return EmbeddedResource(type="resource", resource=contents)


def add_fixtures(server: MCPServer[Any]) -> None:
    """Put all of them on a server."""
    _contents(server)
    _dialogues(server)
    _rounds(server)
    _resources_and_prompts(server)


def _contents(server: MCPServer[Any]) -> None:
    image = ImageContent(type="image", data=PNG, mime_type="image/png")

    @server.tool()
    async def test_simple_text() -> CallToolResult:
        """Answer with text."""
        return text("This is a simple text response for testing.")

    @server.tool()
    async def test_image_content() -> CallToolResult:
        """Answer with an image."""
        return CallToolResult(content=[image])

    @server.tool()
    async def test_audio_content() -> CallToolResult:
        """Answer with a sound."""
        return CallToolResult(content=[AudioContent(type="audio", data=WAV, mime_type="audio/wav")])

    @server.tool()
    async def test_embedded_resource() -> CallToolResult:
        """Answer with a resource."""
        return CallToolResult(
            content=[
                embedded(
                    "test://embedded-resource",
                    "text/plain",
                    "This is an embedded resource content.",
                )
            ]
        )

    @server.tool()
    async def test_multiple_content_types() -> CallToolResult:
        """Answer with text, image and resource."""
        return CallToolResult(
            content=[
                TextContent(type="text", text="Multiple content types test:"),
                image,
                embedded(
                    "test://mixed-content-resource",
                    "application/json",
                    '{"test":"data","value":123}',
                ),
            ]
        )

    @server.tool()
    async def test_error_handling() -> CallToolResult:
        """Fail."""
        raise ToolError("This tool intentionally returns an error for testing")

    @server.tool()
    async def test_tool_with_progress(context: Context[Any, Any]) -> CallToolResult:
        """Report progress."""
        for done in (0, 50, 100):
            await context.report_progress(done, 100, f"Completed step {done} of 100")
            await anyio.sleep(STEP_SECONDS)
        return text("done")

    async def json_schema_2020_12_tool() -> CallToolResult:
        return text("ok")

    tool = Tool.from_function(json_schema_2020_12_tool, description="Its schema is what matters")
    tool.parameters = SCHEMA_2020
    server._tool_manager._tools[tool.name] = tool


def _dialogues(server: MCPServer[Any]) -> None:
    """What a server of the 2025 eras asks its client in the middle of a call."""

    @server.tool()
    async def test_sampling(prompt: str, context: Context[Any, Any]) -> CallToolResult:
        """Ask the client's model."""
        said = await context.session.create_message(
            messages=[SamplingMessage(role="user", content=TextContent(type="text", text=prompt))],
            max_tokens=100,
        )
        assert isinstance(said.content, TextContent)
        return text(f"LLM response: {said.content.text}")

    async def elicit(context: Context[Any, Any], message: str, **properties: Any) -> CallToolResult:
        said = await context.session.elicit_form(
            message, {"type": "object", "properties": properties}, context.request_id
        )
        return text(f"Elicitation completed: action={said.action}, content={said.content}")

    @server.tool()
    async def test_elicitation(message: str, context: Context[Any, Any]) -> CallToolResult:
        """Ask the user."""
        return await elicit(context, message, response={"type": "string"})

    @server.tool()
    async def test_elicitation_sep1034_defaults(context: Context[Any, Any]) -> CallToolResult:
        """Ask the user, with defaults."""
        states = ["active", "inactive", "pending"]
        return await elicit(
            context,
            "Please check your data",
            name={"type": "string", "default": "John Doe"},
            age={"type": "integer", "default": 30},
            score={"type": "number", "default": 95.5},
            status={"type": "string", "enum": states, "default": "active"},
            verified={"type": "boolean", "default": True},
        )

    @server.tool()
    async def test_elicitation_sep1330_enums(context: Context[Any, Any]) -> CallToolResult:
        """Let the user choose."""
        titled = [{"const": f"value{n}", "title": f"Option {n}"} for n in (1, 2, 3)]
        plain = ["option1", "option2", "option3"]
        return await elicit(
            context,
            "Please choose",
            untitledSingle={"type": "string", "enum": plain},
            titledSingle={"type": "string", "oneOf": titled},
            legacyEnum={"type": "string", "enum": plain, "enumNames": ["One", "Two", "Three"]},
            untitledMulti={"type": "array", "items": {"type": "string", "enum": plain}},
            titledMulti={"type": "array", "items": {"anyOf": titled}},
        )


def _asks(message: str, field: str, kind: str = "string") -> ElicitRequest:
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return ElicitRequest(
        params=ElicitRequestFormParams(mode="form", message=message, requested_schema=schema)
    )


def _samples(prompt: str) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
    return CreateMessageRequest(
        params=CreateMessageRequestParams(messages=[message], max_tokens=100)
    )


Requests = dict[str, InputRequest]

NAME: Requests = {"user_name": _asks("What is your name?", "name")}
CONFIRM: Requests = {"confirm": _asks("Please confirm", "ok", "boolean")}
ROUNDS: dict[str, list[Requests]] = {
    "test_input_required_result_elicitation": [NAME],
    "test_input_required_result_sampling": [
        {"capital_question": _samples("What is the capital of France?")}
    ],
    "test_input_required_result_list_roots": [{"client_roots": ListRootsRequest()}],
    "test_input_required_result_request_state": [CONFIRM],
    "test_input_required_result_tampered_state": [CONFIRM],
    "test_input_required_result_multiple_inputs": [
        {**NAME, "greeting": _samples("Generate a greeting"), "client_roots": ListRootsRequest()}
    ],
    "test_input_required_result_multi_round": [
        {"step1": _asks("Step 1: What is your name?", "name")},
        {"step2": _asks("Step 2: What is your favorite color?", "color")},
    ],
}
"""What each of these tools asks for, a round after the other; the state is the round's number."""
STATELESS = {"test_input_required_result_elicitation", "test_input_required_result_sampling"}


def _next(name: str, rounds: list[Requests], context: Context[Any, Any]) -> Any:
    """The next round of questions, or None when all are answered."""
    at = int(context.request_state or 0)
    given = context.input_responses or {}
    asked = rounds[at]
    if set(asked) <= set(given):
        at += 1
        if at == len(rounds):
            return None
    state = None if name in STATELESS else str(at)
    return InputRequiredResult(input_requests=rounds[at], request_state=state)


def _rounds(server: MCPServer[Any]) -> None:
    """What a server of 2026-07-28 asks for: as a result, to be called again with the answers."""

    def add(name: str, rounds: list[Requests]) -> None:
        async def asks(context: Context[Any, Any]) -> CallToolResult | InputRequiredResult:
            more: InputRequiredResult | None = _next(name, rounds, context)
            return more or text("state-ok")

        tool = Tool.from_function(asks, name=name, description="Asks", structured_output=False)
        server._tool_manager._tools[name] = tool

    for name, rounds in ROUNDS.items():
        add(name, rounds)

    @server.tool(structured_output=False)
    async def test_input_required_result_capabilities(
        context: Context[Any, Any],
    ) -> CallToolResult | InputRequiredResult:
        """Ask for what the client can do."""
        can = context.client_capabilities
        requests: Requests = {}
        if can and can.elicitation:
            requests |= NAME
        if can and can.sampling:
            requests["greeting"] = _samples("Generate a greeting")
        return InputRequiredResult(input_requests=requests)

    @server.tool()
    async def test_missing_capability(context: Context[Any, Any]) -> CallToolResult:
        """Need a client that samples."""
        if not (context.client_capabilities and context.client_capabilities.sampling):
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                "this tool needs sampling",
                {"requiredCapabilities": {"sampling": {}}},
            )
        return text("ok")

    @server.tool()
    async def test_streaming_elicitation(context: Context[Any, Any]) -> CallToolResult:
        """Answer with more than one message."""
        await context.report_progress(1, 1, "working")
        return text("ok")

    @server.tool()
    async def test_logging_tool() -> CallToolResult:
        """Answer and log nothing."""
        return text("nothing was logged")

    @server.prompt()
    async def test_input_required_result_prompt(context: Context[Any, Any]) -> Any:
        """Ask before the prompt is given."""
        rounds: list[Requests] = [
            {"user_context": _asks("What context should the prompt use?", "context")}
        ]
        more = _next("", rounds, context)
        if more is not None:
            return more
        said = (context.input_responses or {})["user_context"]
        if not isinstance(said, ElicitResult):
            raise MCPError(INVALID_PARAMS, "user_context is no answer to an elicitation")
        return UserMessage(f"in the context {said.content}")


def _resources_and_prompts(server: MCPServer[Any]) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    async def static_text() -> str:
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    async def static_binary() -> bytes:
        return base64.b64decode(PNG)

    @server.resource("test://template/{id}/data", mime_type="application/json")
    async def template(id: str) -> str:  # noqa: A002 - the scenario's own parameter
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    @server.prompt()
    async def test_simple_prompt() -> UserMessage:
        """A plain prompt."""
        return UserMessage("This is a simple prompt for testing.")

    @server.prompt()
    async def test_prompt_with_arguments(arg1: str, arg2: str) -> UserMessage:
        """A prompt with arguments."""
        return UserMessage(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")

    @server.prompt()
    async def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:  # noqa: N803
        """A prompt with a resource."""
        return [
            UserMessage(
                embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
            ),
            UserMessage("Please process the embedded resource above."),
        ]

    @server.prompt()
    async def test_prompt_with_image() -> list[UserMessage]:
        """A prompt with an image."""
        image = ImageContent(type="image", data=PNG, mime_type="image/png")
        return [UserMessage(image), UserMessage("Please analyze the image above.")]

    @server.completion()  # type: ignore[no-untyped-call,untyped-decorator]
    async def complete(ref: Any, argument: Any, context: Any) -> Completion:
        return Completion(values=[], total=0, has_more=False)
