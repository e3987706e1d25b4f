"""The environment and the settings files for agents to find a session. Knows each client's own variables and files.

Sources: the clients' own documentation, and runs of them (docs/agents.md).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from stenograph.cli.session_calls import OpenSession
from stenograph.core.settings import ENV_PREFIX

_OTHER_LOGINS = (
    "ANTHROPIC_AUTH_TOKEN",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "GOOGLE_API_KEY",
    "GOOGLE_GENAI_USE_GCA",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
)
"""Variables with precedence over those below; they would send a client elsewhere, or a person's credentials here."""
_SERVER_PREFIXES = (ENV_PREFIX, "OTEL_EXPORTER_")
_SERVER_CREDENTIALS = (
    *("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN"),
    *("PGPASSFILE", "PGPASSWORD", "PGSERVICEFILE"),
)
"""Variables with a server's credentials: its settings and those of its traces, the model hub, the store."""
_CODEX, _GEMINI = "codex", "gemini"


def agent_environment(environ: Mapping[str, str], session: OpenSession, folder: Path, *, model: str) -> dict[str, str]:
    """The environment of an agent on a session: `environ`, with the names of other servers replaced or left out.

    The agent's key is good for this session alone, and nothing of the server's own settings and credentials is there:
    whatever the agent may run must not speak for the trainer. `folder` has the settings.
    """
    key = session.agent_key
    made = {name: value for name, value in environ.items() if _is_agents(name)}
    made |= {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": session.root_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": session.root_url,
        "GEMINI_API_KEY": key,
        "CODEX_HOME": str(folder / _CODEX),
        "GEMINI_CLI_HOME": str(folder / _GEMINI),
    }
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in environ):
        for name in ("NO_PROXY", "no_proxy"):
            made[name] = ",".join([*filter(None, [environ.get(name)]), "127.0.0.1", "localhost"])
    return made


def _is_agents(name: str) -> bool:
    """Whether a variable is an agent's to see."""
    return name not in (*_OTHER_LOGINS, *_SERVER_CREDENTIALS) and not name.startswith(_SERVER_PREFIXES)


def write_agent_settings(folder: Path, session: OpenSession, *, model: str) -> None:
    """Write the settings of clients with their server's address in a file: Codex, and Gemini CLI's login."""
    provider = {
        "name": "Stenograph",
        "base_url": session.base_url,
        "wire_api": "responses",
        "env_key": "OPENAI_API_KEY",
    }
    lines = [
        f"model = {json.dumps(model)}",
        'model_provider = "stenograph"',
        "",
        "[model_providers.stenograph]",
        *(f"{name} = {json.dumps(value)}" for name, value in provider.items()),
    ]
    _write(folder / _CODEX / "config.toml", "".join(f"{line}\n" for line in lines))
    login = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    _write(folder / _GEMINI / ".gemini" / "settings.json", json.dumps(login))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
