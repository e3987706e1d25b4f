"""A plugin of pytest: miles' own session tests start `stenograph serve --compat miles` in place of their server.

Their mock of SGLang stays, but for two things that a real SGLang does otherwise: it answers under the `rid` that it was
sent, and payloads for replay are base64, and come only when they are asked for.
"""

import json
import os
import subprocess
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import miles.rollout.session.server as sessions
import miles.utils.test_utils.mock_sglang_server as sglang
import miles.utils.test_utils.uvicorn_thread_server as threads
from starlette.requests import Request
from starlette.responses import Response

START_S = 60
OWN_SERVER = threads.UvicornThreadServer
OWN_MOCK = sglang.MockSGLangServer.__init__


class Sessions:
    """Stands where their server is made: what to start, and before which engine."""

    def __init__(self, args: SimpleNamespace, backend_url: str) -> None:
        self.args, self.backend_url, self.app = args, backend_url, self


class Stenograph:
    """A server process, as they start and stop a server."""

    def __init__(self, app: Sessions, host: str, port: int) -> None:
        args = app.args
        self.url = f"http://{host}:{port}"
        self.command = [
            *("stenograph", "serve", "--compat", "miles", "--reply", "lean"),
            *("--model", os.environ["MILES_MODEL"], "--engine", "sglang", "--engine-url", app.backend_url),
            *("--host", host, "--port", str(port)),
        ]
        if kwargs := getattr(args, "apply_chat_template_kwargs", None):
            self.command += ["--chat-template-kwargs", json.dumps(kwargs)]
        if getattr(args, "use_rollout_routing_replay", False):
            self.command += ["--replay", "routed_experts"]

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5)
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"no server after {START_S} s: {' '.join(self.command)}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(START_S)


def server(app: Any, host: str, port: int) -> Any:
    return (Stenograph if isinstance(app, Sessions) else OWN_SERVER)(app, host=host, port=port)


def mock(self: Any, *args: Any, **options: Any) -> None:
    OWN_MOCK(self, *args, **options)

    async def as_sglang(request: Request, call_next: Any) -> Any:
        asked = await request.body()
        answer = await call_next(request)
        if request.url.path != "/v1/chat/completions" or answer.status_code != 200:
            return answer
        reply = json.loads(b"".join([piece async for piece in answer.body_iterator]))
        reply["id"] = json.loads(asked)["rid"]
        for choice in reply.get("choices", []):
            meta = choice.get("meta_info") or {}
            for name in ("routed_experts", "indexer_topk"):
                if not isinstance(meta.get(name, ""), str):
                    del meta[name]
        return Response(json.dumps(reply), media_type="application/json")

    self.app.middleware("http")(as_sglang)


sessions.SessionServer = Sessions
threads.UvicornThreadServer = server
sglang.UvicornThreadServer = OWN_SERVER
sglang.MockSGLangServer.__init__ = mock
