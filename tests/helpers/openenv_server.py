"""A small OpenEnv server, as the text of its server/app.py; the environment variable KIND chooses how it misbehaves."""

# The wire format of openenv 0.10: one JSON object per message; a session is a websocket. `OPEN` counts sessions.
SERVER = """
import asyncio, json, os, sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

KIND = os.environ.get("KIND", "")
OPEN = 0
fields = {"metadata": {"type": "object"}, "number": {"type": "integer"}}
if KIND == "json":
    fields["colour"] = {"type": "string"}
action = {"title": "CallToolAction"} if KIND == "tools" else {
    "title": "Guess", "properties": fields, "required": [n for n in fields if n != "metadata"]}
SCHEMA = {"action": action, "observation": {"properties": {"hint": {}, "reward": {}, "done": {}}}}

async def talk(ws):
    global OPEN
    await ws.accept()
    if OPEN >= 2:
        await ws.receive_text()
        await ws.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 session"}})
        return await ws.close()
    OPEN += 1
    try:
        secret = 0
        async for text in ws.iter_text():
            m = json.loads(text); data = m["data"]
            def see(hint, reward, done): return {"type": "observation", "data": {
                "observation": {"hint": hint, "metadata": {}}, "reward": reward, "done": done}}
            if m["type"] == "reset":
                secret = data["seed"] % 10
                reply = see("guess 0-9", None, False)
            elif data.get("type") == "list_tools":
                reply = {"type": "observation", "data": {"observation": {"tools": [
                    {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]}}}
            elif data.get("type") == "call_tool":
                ok = data["tool_name"] == "add"
                result = {"result": {"content": [{"type": "text", "text": "7"}]}} if ok else {
                    "error": {"error_type": "tool_not_found", "message": "no such tool"}}
                reply = {"type": "observation", "data": {"observation": result, "reward": 0.5 * ok, "done": False}}
            elif not isinstance(data.get("number"), int) or data["number"] > 9:
                reply = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "number: must be 0 to 9"}}
            elif KIND == "die": os._exit(3)
            elif KIND == "hang": await asyncio.sleep(60)
            elif KIND == "nonsense": await ws.send_text("hello"); continue
            elif KIND in ("nan", "list"):
                value = "NaN" if KIND == "nan" else "[1, 2]"
                text = '{"type": "observation", "data": {"observation": {}, "done": false, "reward": %s}}' % value
                await ws.send_text(text); continue
            elif KIND == "large": await ws.send_text("x" * 2**21); continue
            else:
                n = data["number"]
                hint = "right" if n == secret else "low" if n < secret else "high"
                reply = see(hint, float(n == secret), n == secret)
            await ws.send_json(reply)
    finally:
        OPEN -= 1

app = Starlette(routes=[
    Route("/health", lambda r: JSONResponse({"status": "healthy"})),
    Route("/open", lambda r: JSONResponse(OPEN)),
    Route("/metadata", lambda r: JSONResponse({"description": "Guess the number."})),
    Route("/schema", lambda r: JSONResponse(SCHEMA)),
    WebSocketRoute("/ws", talk)])
"""
