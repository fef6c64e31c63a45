"""Dashboard and alerts name what is published, and promtool evaluates them as they should be.

Without promtool (`apt-get install prometheus`) the checks of the files themselves remain.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from places import REPOSITORY
from test_docs import check_links, text_of

from fskv.observe import metrics

yaml = pytest.importorskip("yaml", reason="the alert rules are YAML")
exporter = pytest.importorskip("fskv_tools.exporter", reason="the command line is not installed")

DASHBOARD = REPOSITORY / "deploy/grafana/dashboard.py"
RULES = REPOSITORY / "deploy/prometheus/fskv.rules.yml"
CONFIG = REPOSITORY / "deploy/prometheus/prometheus.yml"
RULE_TESTS = REPOSITORY / "tests/meta/prometheus/fskv_rules_test.yml"
# vLLM's own, with their labels.
VLLM = {
    "vllm:external_prefix_cache_hits_total": set(),
    "vllm:external_prefix_cache_queries_total": set(),
    "vllm:kv_offload_lookup_async_delay_seconds_bucket": {"connector", "le"},
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
    """Return every series of the dashboard's sources as the endpoint names it, with its own labels."""
    found: dict[str, set[str]] = dict(VLLM)
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


def check_expr(expr: str) -> None:
    """Every metric and every label value of an expression is one that somebody publishes."""
    series = _series()
    names = _names(expr)
    jobs = re.findall(r'\bup\{job="(\w+)"\}', expr)
    assert names or jobs, f"no metric in {expr}"
    scraped = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["scrape_configs"]
    assert set(jobs) <= {job["job_name"] for job in scraped}, expr
    for name in names - {rule.get("record") for rule in _rules()}:
        assert name in series, f"nobody publishes {name}: {expr}"
        for labels in re.findall(re.escape(name) + r"\{([^}]*)\}", expr):
            own = set(re.findall(r"(\w+)\s*[=!]", labels)) - {"instance", "job"}
            assert own <= series[name], f"{name} has no label {own - series[name]}: {expr}"
    by_name = {f"vllm:{m.name}": m for m in metrics.ALL_METRICS}
    for name, reasons in re.findall(r'(vllm:fskv_\w+)_total\{[^}]*reason=~?"([\w|]+)"', expr):
        assert set(reasons.split("|")) <= set(by_name[name].values), expr


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


# --- the files themselves -------------------------------------------------------------------


def test_every_expression_of_the_dashboard_and_of_the_rules_names_what_is_published():
    exprs = [expr for _, expr in _panel_exprs(_dashboard())]
    assert len(exprs) > 40
    for expr in (*exprs, *(rule["expr"] for rule in _rules())):
        check_expr(expr)


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
    fire = set(re.findall(r'alertname="(\w+)"', RULE_TESTS.read_text(encoding="utf-8")))
    assert fire == {rule["alert"] for rule in alerts}
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
    for expr in ("vector(1) == 0", "vector(1)"):
        content = yaml.safe_load(RULES.read_text(encoding="utf-8"))
        for group in content["groups"]:
            for rule in group["rules"]:
                if rule.get("alert") == alert:
                    rule["expr"] = expr
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(content))
        mine = [test for test in tests["tests"] if f'"{alert}"' in str(test)]
        case = {**tests, "rule_files": ["rules.yml"], "tests": mine}
        (tmp_path / "test.yml").write_text(yaml.safe_dump(case))
        assert _promtool("test", "rules", str(tmp_path / "test.yml")).returncode != 0, expr


def test_promtool_understands_every_expression_of_the_dashboard(tmp_path):
    exprs = [expr for _, expr in _panel_exprs(_dashboard())]
    exprs += re.findall(r"^(vllm:\S+ \* on .*)$", text_of("docs/metrics.md"), re.MULTILINE)
    rules = [
        {"record": f"shown:{n}", "expr": re.sub(r"\$__rate_interval|\$__range", "10m", expr)}
        for n, expr in enumerate(exprs)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = _promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
