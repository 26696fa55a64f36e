"""The endpoint as an agent in JavaScript sees it: the real `openai` package of npm, with a tool loop and streams."""

import json
import shutil
import subprocess

import pytest
from endpoints import Policy, endpoint, said

pytestmark = pytest.mark.full

# An agent as people write it: it asks, runs the tools that the model calls, sends the results, and asks again.
AGENT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object", properties: {} } } }];
const messages = [{ role: "user", content: "3+4=" }];
const out = { turns: 0 };
for (;;) {
  const reply = await client.chat.completions.create({ model: "policy", messages, tools });
  out.turns += 1;
  const message = reply.choices[0].message;
  messages.push(message);
  if (!message.tool_calls) { out.answer = message.content; break; }
  for (const call of message.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
const stream = await client.chat.completions.create({ model: "policy", messages, stream: true });
out.streamed = "";
for await (const chunk of stream) out.streamed += chunk.choices[0]?.delta?.content ?? "";
const response = await client.responses.create({ model: "policy", input: "3+4=" });
out.response = response.output_text;
try {
  await client.responses.create({ model: "policy", input: "and?", previous_response_id: response.id });
} catch (error) {
  out.refused = [error.status, error.code];
}
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = ["npm", "install", "--silent", "--prefix", str(folder), "openai"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=400)
    if done.returncode:
        pytest.skip(f"the npm registry did not provide the package: {done.stderr[-200:]}")
    (folder / "agent.mjs").write_text(AGENT)
    return folder


def test_an_agent_from_npm_calls_tools_streams_and_is_refused_what_we_do_not_keep(folder):
    def answer(ask):
        if not ask.tools:
            return said("7")
        results = [m["content"] for m in ask.messages if m["role"] == "tool"]
        return said(f"it is {results[-1]}") if results else said("", (("add", '{"a": 3, "b": 4}'),))

    policy = Policy(answer)
    with endpoint(policy) as (_, _, url, key):
        done = subprocess.run(
            ["node", "agent.mjs", url, key], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    out = json.loads(done.stdout)
    assert (out["turns"], out["answer"], out["streamed"], out["response"]) == (2, "it is 7", "7", "7")
    assert out["refused"] == [400, "previous_response_not_found"]
    assert [m["role"] for m in policy.asked[1].messages] == ["user", "assistant", "tool"]
