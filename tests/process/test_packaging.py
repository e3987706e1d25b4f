"""packaging/: its files say what the server understands, and what runs without a container daemon is run.

The schemas of Compose and Kubernetes are checked where their packages are: `scripts/test-packaging` installs them.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from standins.tiny.llama import write_tiny_folder
from stenograph.cli.main import main
from stenograph.cli.settings_table import SETTINGS, load_settings
from stenograph.cluster.worker import WORKER_METRICS
from stenograph.http.metric_table import METRICS, WEIGHT_METRICS, MetricType
from stenograph.http.metrics import Metrics
from stenograph.http.session_services import STORE_METRICS
from stenograph.otel.tracing import TRACE_METRICS

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"

pytestmark = pytest.mark.timeout(600)

EVERY_METRIC = (*METRICS, *STORE_METRICS, *WEIGHT_METRICS, *TRACE_METRICS, *WORKER_METRICS)

_TEXT = {"type": "string", "minLength": 1}
_TIME = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
RULES_SCHEMA = {
    "type": "object",
    "required": ["groups"],
    "additionalProperties": False,
    "properties": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": _TEXT,
                    "interval": _TIME,
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr", "labels", "annotations"],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"type": "string", "pattern": "^Stenograph[A-Za-z]+$"},
                                "expr": _TEXT,
                                "for": _TIME,
                                "keep_firing_for": _TIME,
                                "labels": {
                                    "type": "object",
                                    "required": ["severity"],
                                    "additionalProperties": False,
                                    "properties": {"severity": {"enum": ["critical", "warning", "info"]}},
                                },
                                "annotations": {
                                    "type": "object",
                                    "required": ["summary"],
                                    "additionalProperties": _TEXT,
                                },
                            },
                        },
                    },
                },
            },
        }
    },
}
"""A file of alerting rules. Source: prometheus.io/docs/prometheus/latest/configuration/recording_rules."""


def instructions() -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions, each on one line."""
    text = re.sub(r"^#.*\n", "", (PACKAGING / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest


def instruction(name: str) -> str:
    return [rest for other, rest in instructions() if other == name][-1]


def environment() -> dict[str, str]:
    """The image's variables."""
    return dict(pair.split("=", 1) for name, rest in instructions() if name == "ENV" for pair in rest.split())


def compose() -> Any:
    return yaml.safe_load((PACKAGING / "compose.yaml").read_text())


def manifests() -> list[Any]:
    return list(yaml.safe_load_all((PACKAGING / "kubernetes.yaml").read_text()))


def test_the_image_is_built_of_what_is_there_and_runs_as_nobody_in_particular() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {name for name, _ in instructions()} == known | {"ENTRYPOINT"}
    for name, rest in instructions():
        if name == "ARG":
            assert re.fullmatch(r"BASE=[\w./-]+:[\w.-]*\d[\w.-]*", rest)  # of a version
        if name == "FROM":
            assert re.fullmatch(r"\$\{BASE\}( AS \w+)?", rest)
        if name == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
    copied = [
        name for kind, rest in instructions() if kind == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    ]
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(sent) == sorted(copied)
    assert instruction("USER") == "10001"
    assert instruction("EXPOSE") == environment()["STENOGRAPH_PORT"]


def test_every_variable_and_flag_is_a_setting() -> None:
    names = {setting.env for setting in SETTINGS}
    server = compose()["services"]["server"]
    container = manifests()[1]["spec"]["template"]["spec"]["containers"][0]
    given = {*environment(), *server["environment"], *(one["name"] for one in container["env"])} - {"PATH"}
    assert given <= names
    for flags in (server["command"], container["args"]):
        by_flag = {setting.flag: setting.name for setting in SETTINGS}
        values = {by_flag[flag]: value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
        image = {name: value for name, value in environment().items() if name != "PATH"}
        settings = load_settings(values, image, None)
        assert settings.workers == 2
        grace_s = settings.drain_timeout_s + settings.abort_grace_s
        assert int(server["stop_grace_period"].removesuffix("s")) > grace_s
        assert manifests()[1]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > grace_s


def test_the_servers_of_a_shared_database_start_with_what_they_are_given() -> None:
    """As Compose and Kubernetes merge and substitute, which is what they document."""
    alone, shared = compose(), yaml.safe_load((PACKAGING / "compose-postgres.yaml").read_text())["services"]
    first = {**alone["services"]["server"], **shared["server"]}
    first["environment"] = {**alone["services"]["server"]["environment"], **shared["server"]["environment"]}
    service, deployment = yaml.safe_load_all((PACKAGING / "kubernetes-postgres.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    in_pod = {one["name"]: one.get("value", "postgresql://me@db/x") for one in container["env"]}
    assert deployment["spec"]["replicas"] > 1
    parts = ("entrypoint", "command", "environment", "stop_grace_period")
    servers = [[one[part] for part in parts] for one in (first, shared["second"])]
    servers.append([container["command"], container["args"], in_pod, f"{pod['terminationGracePeriodSeconds']}s"])
    urls = []
    for entry, flags, given, grace in servers:
        assert [*entry[:2], *entry[3:]] == ["env", "-u", *json.loads(instruction("ENTRYPOINT"))]
        variables = {**environment(), **given, "STENOGRAPH_API_KEY": "key"}
        del variables[entry[2]]
        texts = {name: re.sub(r"\$\{.*?\}", "secret", text) for name, text in variables.items()}
        ours = {
            name: text.replace("$(POD_IP)", "10.0.0.5")
            for name, text in texts.items()
            if name.startswith("STENOGRAPH_")
        }
        by_flag = {setting.flag: setting.name for setting in SETTINGS}
        values = {by_flag[flag]: value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
        settings = load_settings(values, ours, None)
        assert settings.store
        assert settings.data_dir is None
        assert int(grace.removesuffix("s")) > settings.drain_timeout_s + settings.abort_grace_s
        urls.append(str(settings.advertise_url))
        host = urls[-1].removeprefix("http://").removesuffix(f":{service['spec']['ports'][0]['port']}")
        assert host in settings.allow_host or host == "10.0.0.5"
    (job,) = yaml.safe_load((PACKAGING / "prometheus-postgres.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [url.removeprefix("http://") for url in urls[:2]]}]
    login = shared["postgres"]["environment"]
    assert f"{login['POSTGRES_USER']}:{login['POSTGRES_PASSWORD']}@postgres/{login['POSTGRES_DB']}" in str(first)
    assert re.search(r"pip install .*'\.\[(\w+,)*postgres[\],]", (PACKAGING / "Dockerfile").read_text())


def test_the_files_of_packaging_agree_with_one_another() -> None:
    services, port = compose()["services"], environment()["STENOGRAPH_PORT"]
    (job,) = yaml.safe_load((PACKAGING / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{port}"]}]
    (source,) = yaml.safe_load((PACKAGING / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((PACKAGING / "grafana/provisioning/dashboards/stenograph.yaml").read_text())[
        "providers"
    ]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert provider["options"]["path"] == mounted["./grafana/dashboards"]
    for volume in (volume for service in services.values() for volume in service["volumes"]):
        place = volume.split(":")[0]
        assert (PACKAGING / place).exists() if place.startswith(".") else place in compose()["volumes"]
    service, server = manifests()
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == int(port)
    assert {one["mountPath"] for one in container["volumeMounts"]} == {"/data", "/cache", "/tmp"}
    assert {environment()[name] for name in ("STENOGRAPH_DATA_DIR", "STENOGRAPH_CACHE")} == {"/data", "/cache"}


def labels_of_metrics() -> dict[str, set[str]]:
    """Each series that Prometheus reads of a server, and the labels of its own that it has there."""
    labels: dict[str, set[str]] = {}
    for metric in EVERY_METRIC:
        for suffix in ("_bucket", "_sum", "_count") if metric.type is MetricType.HISTOGRAM else ("",):
            labels[metric.name + suffix] = {*metric.labels, "worker", *(("le",) if suffix == "_bucket" else ())}
    of_process = re.findall(r"^# TYPE (process_\w+)", Metrics().exposition()[0].decode(), re.MULTILINE)
    return labels | {name: {"worker"} for name in of_process}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PACKAGING / "alerts.yaml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_the_alerts_have_the_shape_that_prometheus_loads() -> None:
    jsonschema.validate(yaml.safe_load((PACKAGING / "alerts.yaml").read_text()), RULES_SCHEMA)
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 20
    mounted = dict(volume.split(":")[:2] for volume in compose()["services"]["prometheus"]["volumes"])
    beside = Path(mounted["./prometheus.yaml"]).parent
    (loaded,) = yaml.safe_load((PACKAGING / "prometheus.yaml").read_text())["rule_files"]
    assert Path(mounted[f"./{loaded}"]) == beside / loaded


def test_the_alerts_ask_for_metrics_that_there_are_with_labels_and_values_that_they_have() -> None:
    labels, metrics = labels_of_metrics(), {metric.name: metric for metric in EVERY_METRIC}
    for rule in alerts():
        found = set(re.findall(r"\b(?:stenograph|process)_\w+", rule["expr"]))
        assert found or rule["expr"].startswith("up{"), rule
        assert found <= set(labels), rule
        of_all = set.intersection(*(labels[name] for name in found)) if found else set()
        of_prometheus = {"instance", "job"}
        grouped = {name for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in group.split(", ")}
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert grouped | shown <= of_all | of_prometheus, rule
        if grouped:
            assert shown <= grouped, rule
        for name, matchers in re.findall(r"\b(\w+)\{([^}]*)\}", rule["expr"]):
            for label, values in re.findall(r"(\w+)(?:=|!=|=~)\"([^\"]*)\"", matchers):
                assert label in of_prometheus or label == metrics[name].label, rule
                known = metrics[name].values if label not in of_prometheus else ("stenograph",)
                assert set(values.split("|")) <= set(known), rule
        for name in found & metrics.keys():
            if metrics[name].is_open and not metrics[name].values:
                assert "increase(" not in rule["expr"], f"{rule['alert']}: it would not see a first count"


def test_each_alert_has_its_line_in_the_handbook() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().split("## Metrics to watch\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in page.splitlines() if row.startswith("| `Stenograph")]
    assert rows == [[f" `{rule['alert']}` ", f" {rule['labels']['severity']} "] for rule in alerts()]


def test_prometheus_s_own_tool_takes_the_alerts() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed here")
    done = subprocess.run([tool, "check", "rules", str(PACKAGING / "alerts.yaml")], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_expression_is_one_of_prometheus() -> None:
    promql = pytest.importorskip("promql_parser", reason="scripts/test-packaging installs it")
    dashboard = json.loads((PACKAGING / "grafana/dashboards/stenograph.json").read_text())
    for expression in [
        *(rule["expr"] for rule in alerts()),
        *(one["expr"] for panel in dashboard["panels"] for one in panel["targets"]),
    ]:
        assert promql.parse(expression) is not None


def test_the_dashboard_asks_for_metrics_that_there_are_with_labels_that_they_have() -> None:
    dashboard, labels = json.loads((PACKAGING / "grafana/dashboards/stenograph.json").read_text()), labels_of_metrics()
    expressions = [(panel["title"], one) for panel in dashboard["panels"] for one in panel["targets"]]
    assert len(expressions) > 15
    for title, one in expressions:
        found = re.findall(r"\b(?:stenograph|process)_\w+", one["expr"])
        assert found, title
        assert set(found) <= set(labels), title
        asked = {name for group in re.findall(r"by \(([^)]*)\)", one["expr"]) for name in group.split(", ")}
        asked |= set(re.findall(r"\{\{(\w+)\}\}", one["legendFormat"]))
        assert asked <= set.intersection(*(labels[name] for name in found)), title


async def test_the_image_s_command_serves_and_its_health_check_finds_it(tmp_path: Path) -> None:
    entry: list[str] = json.loads(instruction("ENTRYPOINT"))
    assert entry == ["stenograph", "serve"]
    assert main.__module__ == "stenograph.cli.main"  # which the script `stenograph` is
    own = {"STENOGRAPH_DATA_DIR": str(tmp_path / "data"), "STENOGRAPH_PORT": "0", "STENOGRAPH_CACHE": str(tmp_path)}
    variables = {name: value for name, value in environment().items() if name.startswith("STENOGRAPH_")}
    model = write_tiny_folder(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", *entry[1:], *compose()["services"]["server"]["command"]),
        *("--model", str(model), "--family", "smollm2"),
        env={**os.environ, **variables, **own},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        found = re.search(r"http://0\.0\.0\.0:(\d+) ", (await process.stdout.readline()).decode())
        assert found is not None
        python, *arguments = json.loads(instruction("HEALTHCHECK").split(" CMD ")[1])
        assert python == "python"
        checks = []
        for port in (found[1], "1"):
            check = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env={**os.environ, "STENOGRAPH_PORT": port}, stderr=subprocess.DEVNULL
            )
            checks.append(await check.wait())
        assert checks == [0, 1]
        process.send_signal(signal.SIGTERM)
        logged = (await process.stderr.read()).decode().splitlines()
        assert await process.wait() == 0
        assert {json.loads(line).get("worker") for line in logged} >= {0, 1}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("name", ["compose.yaml", "compose-postgres.yaml"])
def test_the_compose_file_is_what_its_specification_says(name: str) -> None:
    pytest.importorskip("check_jsonschema", reason="scripts/test-packaging installs it")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(PACKAGING / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-postgres.yaml"])
def test_the_manifests_are_what_kubernetes_takes(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="scripts/test-packaging installs it")
    for manifest in yaml.safe_load_all((PACKAGING / name).read_text()):
        validate.validate(manifest, validate.latest_version(), strict=True)
