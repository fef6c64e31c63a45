"""Dashboard and alerts name what is published, alerts fire when they should, and a real Prometheus agrees.

Without Prometheus and promtool (`apt-get install prometheus`) the checks of the files themselves remain.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from places import REPOSITORY
from test_docs import check_links, text_of

from fskv.observe import metrics

yaml = pytest.importorskip("yaml", reason="the alert rules are YAML")
exporter = pytest.importorskip("fskv_tools.exporter", reason="the command line is not installed")
static_metrics = pytest.importorskip("static_metrics", reason="the command line is not installed")

DASHBOARD = REPOSITORY / "deploy/grafana/dashboard.py"
RULES = REPOSITORY / "deploy/prometheus/fskv.rules.yml"
CONFIG = REPOSITORY / "deploy/prometheus/prometheus.yml"
RULE_TESTS = REPOSITORY / "tests/meta/prometheus/fskv_rules_test.yml"
# vLLM's own.
VLLM = {
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:kv_offload_lookup_async_delay_seconds_bucket",
}


def test_vllm_publishes_what_the_dashboard_shows_of_it():
    found = importlib.util.find_spec("vllm") or pytest.skip("needs vLLM: make test")
    package = pathlib.Path(found.origin).parent
    texts = [path.read_text() for path in package.glob("v1/metrics/*.py")]
    texts += [path.read_text() for path in package.glob("distributed/**/metrics.py")]
    for name in {re.sub("_(total|bucket)$", "", name) for name in VLLM}:
        assert any(f'"{name}"' in text for text in texts), name


def _needs(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} here: apt-get install prometheus")
    return found


def _series() -> dict[str, set[str]]:
    """Return every series of fskv as the endpoint names it, with its own labels."""
    found: dict[str, set[str]] = {}
    for metric in (*metrics.ALL_METRICS, *metrics.MULTI_METRICS):
        # FskvMultiConnector gives it to every series.
        labels = {metric.label, "connector"} - {None}
        name = f"vllm:{metric.name}"
        if metric.kind == "histogram":
            found |= {f"{name}_{end}": labels for end in ("sum", "count")}
            found[f"{name}_bucket"] = labels | {"le"}
        else:
            found[name + "_total" * (metric.kind == "counter")] = labels
    for metric in exporter.METRICS:
        found[metric.name + "_total" * (metric.kind == "counter")] = set(metric.labels)
    return found


def _names(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|fskv_|job_model_connector:)[a-zA-Z_:0-9]+", expr))


def check_expr(expr: str, recorded: set[str] = frozenset()) -> None:
    """Every metric and every label value of an expression is one that somebody publishes."""
    series = _series()
    names = _names(expr)
    jobs = re.findall(r'\bup\{job="(\w+)"\}', expr)
    assert names or jobs, f"no metric in {expr}"
    assert set(jobs) <= {job["job_name"] for job in _config()["scrape_configs"]}, expr
    for name in names - VLLM - recorded:
        assert name in series, f"nobody publishes {name}: {expr}"
        for labels in re.findall(re.escape(name) + r"\{([^}]*)\}", expr):
            own = set(re.findall(r"(\w+)\s*[=!]", labels)) - {"instance", "job"}
            assert own <= series[name], f"{name} has no label {own - series[name]}: {expr}"
    by_name = {f"vllm:{m.name}": m for m in metrics.ALL_METRICS}
    for name, reasons in re.findall(r'(vllm:fskv_\w+)_total\{[^}]*reason=~?"([\w|]+)"', expr):
        metric = by_name[name]
        late = set(reasons.split("|")) - set(metric.values)  # no series before the first one
        assert late <= set(re.findall(r"\w+", metric.meaning.partition(": ")[2])), expr
        assert not late or f"unless {name}_total" in expr, f"the first one is not seen: {expr}"


def _config() -> dict:
    return yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


@functools.cache
def _dashboard() -> dict:
    done = subprocess.run([sys.executable, DASHBOARD], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _panel_exprs(dashboard: dict) -> list[tuple[str, str]]:
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def _rules() -> list[dict]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _recorded() -> set[str]:
    return {rule["record"] for rule in _rules() if "record" in rule}


# --- the files themselves -------------------------------------------------------------------


def test_every_expression_of_the_dashboard_and_of_the_rules_names_what_is_published():
    exprs = [expr for _, expr in _panel_exprs(_dashboard())]
    assert len(exprs) > 40
    for expr in exprs:
        check_expr(expr)
    for rule in _rules():
        check_expr(rule["expr"], _recorded())


def test_every_metric_is_on_the_dashboard():
    """Whoever adds a metric decides where operators see it, or says here why they need not."""
    unseen = {
        # The count beside bytes and latency; sums that are in rates.
        "vllm:fskv_load_latency_seconds_sum",
        "vllm:fskv_load_latency_seconds_count",
    }
    shown = set().union(*(_names(expr) for _, expr in _panel_exprs(_dashboard())))
    missing = _series().keys() - shown - unseen
    assert not missing, f"{DASHBOARD} shows nothing of {sorted(missing)}"
    assert unseen <= _series().keys()
    assert not unseen & shown


@pytest.mark.parametrize(
    "expr",
    [
        "rate(vllm:fskv_lookup_hit_total[5m])",
        'vllm:fskv_breaker_open{reason="x"}',
        'increase(vllm:fskv_load_failures_total{reason="corrupted"}[5m])',
        'up{job="watchers"} == 0',
        "fskv_root_limit",
    ],
)
def test_negative_control_an_expression_of_nothing_is_found(expr):
    with pytest.raises(AssertionError):
        check_expr(expr)


def test_every_variable_of_the_dashboard_is_one_that_grafana_has():
    dashboard = _dashboard()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for title, expr in _panel_exprs(dashboard):
        used = set(re.findall(r"\$\{?(\w+)", expr))
        assert used <= variables | {"__rate_interval", "__range"}, title


def test_every_alert_is_described_and_leads_to_a_section():
    alerts = [rule for rule in _rules() if "alert" in rule]
    tested = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    fires = {t["alertname"] for one in tested for t in one["alert_rule_test"] if t["exp_alerts"]}
    quiet = {
        t["alertname"] for one in tested for t in one["alert_rule_test"] if not t["exp_alerts"]
    }
    assert fires == quiet == {rule["alert"] for rule in alerts}, "a test of each kind for each"
    for rule in alerts:
        document, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        check_links(document, f"[runbook](#{anchor})\n{text_of(document)}")


# --- promtool -------------------------------------------------------------------------------


def _promtool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [_needs("promtool"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [("rules", RULES), ("config", CONFIG)])
def test_promtool_finds_nothing_wrong(words):
    done = _promtool("check", *map(str, words))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_where_it_should_and_not_where_it_should_not():
    done = _promtool("test", "rules", str(RULE_TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", [rule["alert"] for rule in _rules() if "alert" in rule])
def test_negative_control_an_alert_that_never_or_always_fires_fails_its_tests(alert, tmp_path):
    tests = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))
    mine = [t for t in tests["tests"] if t["alert_rule_test"][0]["alertname"] == alert]
    for expr in ("vector(1) == 0", "vllm:fskv_x or fskv_x or vector(1)"):
        content = yaml.safe_load(RULES.read_text(encoding="utf-8"))
        for group in content["groups"]:
            for rule in group["rules"]:
                if rule.get("alert") == alert:
                    rule["expr"] = expr
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(content))
        case = {**tests, "rule_files": ["rules.yml"], "tests": mine}
        (tmp_path / "test.yml").write_text(yaml.safe_dump(case))
        assert _promtool("test", "rules", str(tmp_path / "test.yml")).returncode != 0, expr


# --- a real Prometheus ----------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Prometheus:
    """A Prometheus with the configuration of deploy/, that scrapes these ports (by job) every second."""

    def __init__(self, directory: pathlib.Path, targets: dict[str, tuple[int, ...]]):
        directory.mkdir()
        self.port = _free_port()
        config = _config()
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        for job in config["scrape_configs"]:
            addresses = [f"127.0.0.1:{port}" for port in targets[job["job_name"]]]
            job["static_configs"] = [{"targets": addresses}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = directory / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    _needs("prometheus"),
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def get(self, path: str, **query: str) -> dict:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def series(self, expr: str) -> list[tuple[dict[str, str], float]]:
        found = self.get("query", query=expr)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def values(self, expr: str) -> list[float]:
        return [value for _, value in self.series(expr)]

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()


def _until(condition, what: str, timeout_s: float = 180.0) -> None:
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < end, what
        time.sleep(0.2)


def _filled(expr: str) -> str:
    """Fill in Grafana's variables."""
    for variable, value in (
        ("$__rate_interval", "10m"),
        ("$__range", "10m"),
        ("$instance", ".*"),
        ("$root", ".*"),
    ):
        expr = expr.replace(variable, value)
    return expr


CHILDREN = {"/nvme/kv": "nvme", "/nfs/kv": "nfs"}
# What a join must have so that a series of one child meets that child's root.
ON = "on (job, instance, engine, model_name, connector)"
ON_WITHOUT = "on (job, instance, engine, model_name)"


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """A Prometheus with an engine of two children, one of a single connector, and a watcher."""
    _needs("prometheus")
    with contextlib.ExitStack() as stack:
        of_two = static_metrics.engine(CHILDREN, has_none="/nvme/kv", has_all="/nfs/kv")
        two = stack.enter_context(static_metrics.served(of_two))
        one = stack.enter_context(static_metrics.served(static_metrics.engine({"/one": None})))
        watched = stack.enter_context(static_metrics.served(static_metrics.watcher("/nfs/kv")))
        ports = {"vllm": (two, one), "fskv": (watched,)}
        prometheus = Prometheus(tmp_path_factory.mktemp("static") / "prometheus", ports)
        stack.callback(prometheus.stop)
        _until(
            lambda: (
                len(prometheus.values("rate(vllm:fskv_stored_bytes_total[1m])")) == 3
                and prometheus.values("rate(fskv_root_pruned_files_total[1m])")
                and prometheus.values("job_model_connector:fskv_hit_ratio:30m")
            ),
            "nothing is scraped",
        )
        yield prometheus


def _refused(prometheus: Prometheus, expr: str) -> str | None:
    """Return why Prometheus does not evaluate this, if it does not."""
    try:
        prometheus.series(_filled(expr))
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]
    return None


def test_every_expression_is_evaluated_where_two_children_publish_the_same_metrics(static):
    exprs = [expr for _, expr in _panel_exprs(_dashboard())] + [r["expr"] for r in _rules()]
    exprs += re.findall(r"^(vllm:\S+ \* on .*)$", text_of("docs/metrics.md"), re.MULTILINE)
    assert [(expr, why) for expr in exprs if (why := _refused(static, expr))] == []
    empty = [expr for _, expr in _panel_exprs(_dashboard()) if not static.values(_filled(expr))]
    assert empty == []
    _until(
        lambda: all(
            rule["health"] == "ok"
            for group in static.get("rules")["groups"]
            for rule in group["rules"]
        ),
        "a rule cannot be evaluated",
        30,
    )


def test_negative_control_joins_without_the_child_s_name_are_refused(static):
    joins = [expr for _, expr in _panel_exprs(_dashboard()) if ON in expr]
    assert len(joins) >= 12
    for expr in joins:
        why = _refused(static, expr.replace(ON, ON_WITHOUT))
        assert why, expr
        assert "duplicate series" in why


def test_series_of_two_children_are_shown_apart(static):
    """By connector, and by root through the join; the engine with one connector is there as well."""
    panels = {(panel["title"]): panel["targets"] for panel in _dashboard()["panels"][1:]
              if "targets" in panel}  # fmt: skip
    for title, targets in panels.items():
        for target in targets:
            found = [labels for labels, _ in static.series(_filled(target["expr"]))]
            shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            if "connector" in shown:
                multi = "fskv_multi_" in target["expr"]
                names = {labels.get("connector", "") for labels in found}
                assert names == {"nvme", "nfs", *([] if multi else [""])}, title
            if "root" in shown and "vllm:" in target["expr"]:
                assert {labels["root"] for labels in found} == {*CHILDREN, "/one"}, title
            # Two lines of a panel with one name would be two children that nobody can tell apart.
            lines = [tuple(labels.get(name, "") for name in sorted(shown)) for labels in found]
            assert len(lines) == len(set(lines)), (title, target["expr"])


def test_a_hit_ratio_is_that_of_one_child(static):
    """One child has everything and the other nothing: every prompt is served."""
    of_child = {"nvme": 0.0, "nfs": 1.0}
    shown = [
        expr
        for title, expr in _panel_exprs(_dashboard())
        if title == "Chunks found, of those looked for"
    ]
    ratio = "job_model_connector:fskv_hit_ratio:30m"
    rule = next(rule["expr"] for rule in _rules() if rule.get("record") == ratio)
    assert len(shown) == 2
    for expr in (*shown, rule):
        found = {labels.get("connector"): value for labels, value in static.series(_filled(expr))}
        assert found.items() >= of_child.items(), expr
        assert found.keys() == {*of_child, None}
    (summed,) = static.values(rule.replace(", connector)", ")"))
    assert 0 < summed < 0.9, "negative control: as it was"
