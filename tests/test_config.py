"""The configuration: real files and environments to values, origins, warnings and mistakes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.config import Config, ConfigError, load_config
from oomwatch.config.fields import Key, members
from oomwatch.config.headers import parse_headers
from oomwatch.config.layers import all_keys, dotted
from oomwatch.config.paths import config_paths, default_store
from oomwatch.config.quantities import parse_duration, show_duration, show_size
from oomwatch.config.secrets import engine_headers, read_secret, store_address
from oomwatch.config.sinks import SINKS
from oomwatch.config.texts import (
    example_toml,
    in_force,
    merged_json,
    merged_toml,
    reference,
    sections,
)
from oomwatch.config.values import hide_url
from oomwatch.units import parse_size

ROOT = Path(__file__).parent.parent
REPEATED = {path for path, section in sections() if section.repeated}


def numbered(path):
    """A key as it is written; of a table that may be there many times, that of the first."""
    for repeated in REPEATED:
        if path[:-1] == repeated:
            return dotted((*repeated, "0", path[-1]))
    return dotted(path)


@pytest.fixture
def load(tmp_path):
    """Load the configuration that a text is, with nothing else around."""

    def loader(text="", environ=None, **more):
        path = tmp_path / "config.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, environ=environ or {}, **more)

    return loader


def problems(load, text="", environ=None, **more):
    with pytest.raises(ConfigError) as caught:
        load(text, environ, **more)
    assert "\n" not in str(caught.value)
    return caught.value.problems


# ---------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("5min", 300),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604800),
        ("2w", 1209600),
        ("1h30min", 5400),
        ("1h 30min", 5400),
        ("1.5h", 5400),
        (" 30 S ", 30),
        ("30", None),
        ("", None),
        ("-5s", None),
        ("5 parsecs", None),
        ("s", None),
        ("1e3s", None),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**10))
def test_durations_survive_being_shown(milliseconds):
    seconds = milliseconds / 1000
    assert parse_duration(show_duration(seconds)) == pytest.approx(seconds, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.integers(0, 2**50), st.integers(0, 2**20).map(lambda n: n * 1024**2)))
def test_sizes_survive_being_shown(size):
    assert parse_size(show_size(size)) == size


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_not(text):
    seconds = parse_duration(text)
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:8000/metrics", "http://h:8000/metrics"),
        ("http://user:pass@h/m", "http://user:***@h/m"),
        ("https://token@h/m", "https://***@h/m"),
        ("http://h/m?token=abc&x=1", "http://h/m?token=***&x=***"),
        ("postgresql://oomwatch@db/oomwatch", "postgresql://oomwatch@db/oomwatch"),
        ("postgresql://oomwatch:s3cret@db/oomwatch", "postgresql://oomwatch:***@db/oomwatch"),
        ("postgresql:///oomwatch?password=s3cret", "postgresql:///oomwatch?password=***"),
        ("sqlite:////var/lib/x.db", "sqlite:////var/lib/x.db"),
        ("http://[bad", "***"),
    ],
)
def test_urls_are_shown_without_secrets(url, shown):
    assert hide_url(url) == shown


def test_headers_of_a_file():
    text = "# for the gateway\nAuthorization: Bearer abc:def\n\nX-Tenant:a\n"
    assert parse_headers(text) == {"Authorization": "Bearer abc:def", "X-Tenant": "a"}
    for wrong in ("no colon", "bad name: x", "X: a\x1bb", "X:", ": x"):
        with pytest.raises(ValueError, match="number 2") as caught:
            parse_headers(f"A: b\n{wrong}")
        assert wrong not in str(caught.value)


# ---------------------------------------------------------------- layers
def test_without_anything_all_is_default(load):
    loaded = load()
    assert loaded.config == Config()
    assert loaded.warnings == ()
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}


def test_units_of_the_file_become_those_of_the_program(load):
    config = load("""
        schema_version = 1
        [agent]
        sampling_interval = "2s"
        burst_on = ["incident", "start", "incident"]
        [store]
        max_size = "512MiB"
        [detect.kv_saturation]
        mode = "observe"
        critical = 1
        [detect.preemption_storm]
        warn_per_minute = 5
        [privacy]
        redact_host_names = true
    """).config
    assert config.agent.sampling_interval_seconds == 2.0
    assert config.agent.burst_on == ("incident", "start")
    assert config.store.max_size_bytes == 512 * 1024**2
    assert config.detect.kv_saturation.mode == "observe"
    assert config.detect.kv_saturation.critical_ratio == 1.0
    assert config.detect.preemption_storm.warn_per_minute == 5.0
    assert config.privacy.redact_host_names is True


def test_flag_over_environment_over_file_over_default(load, tmp_path):
    loaded = load(
        '[agent]\nsampling_interval = "2s"\nburst_hold = "1min"\nlog_level = "debug"',
        {"OOMWATCH_AGENT__SAMPLING_INTERVAL": "3s", "OOMWATCH_AGENT__BURST_HOLD": "2min"},
        overrides={"agent.sampling_interval": "4s"},
    )
    agent, origins = loaded.config.agent, loaded.origins
    assert agent.sampling_interval_seconds == 4.0
    assert agent.burst_hold_seconds == 120.0
    assert agent.log_level == "debug"
    assert agent.scrape_interval_seconds == 1.0
    assert origins["agent.sampling_interval"].layer == "flag"
    assert str(origins["agent.burst_hold"]) == "OOMWATCH_AGENT__BURST_HOLD"
    assert str(origins["agent.log_level"]) == str(tmp_path / "config.toml")
    assert origins["agent.scrape_interval"].layer == "default"


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("SOURCES__DOCKER", "no", None, None),
        ("SOURCES__CONTAINERS", "no", "sources.containers", False),
        ("SOURCES__CONTAINERS", "TRUE", "sources.containers", True),
        ("AGENT__QUEUE_SIZE", "500", "agent.queue_size", 500),
        ("AGENT__BURST_ON", "start, incident", "agent.burst_on", ["start", "incident"]),
        ("AGENT__BURST_ON", "", "agent.burst_on", []),
        ("DETECT__KV_SATURATION__WARN", "0.95", "detect.kv_saturation.warn", 0.95),
        ("DETECT__GPU_LOST__MODE", "off", "detect.gpu_lost.mode", "off"),
        ("DISCOVERY__ENGINES__OLLAMA", "0", "discovery.engines.ollama", False),
        ("STORE__MAX_SIZE", "1GiB", "store.max_size", 1024**3),
    ],
)
def test_every_kind_of_value_comes_from_the_environment_too(load, name, text, key, value):
    loaded = load("", {f"OOMWATCH_{name}": text})
    if key is None:
        assert "sources.docker is not known" in loaded.warnings[0]
        return
    shown = {entry["key"]: entry for entry in merged_json(loaded.config, loaded.origins)}
    assert shown[key]["value"] == value
    assert shown[key]["origin"] == "environment"
    assert shown[key]["variable"] == f"OOMWATCH_{name}"


def test_every_key_has_a_variable_that_sets_it(load):
    """What the merged view names as a key's variable is read as that key."""
    loaded = load('[[engine]]\nname = "a"\nport = 1')
    entries = merged_json(loaded.config, loaded.origins)
    values = {
        entry["variable"]: json.loads(entry["text"]) if entry["text"][0] == '"' else entry["text"]
        for entry in entries
        if entry["text"] not in (None, "{  }")
    }
    again = load("", values)
    assert again.config == loaded.config
    assert {str(again.origins[entry["key"]]) for entry in entries if entry["value"]} <= set(values)


def test_engines_from_file_and_environment(load):
    loaded = load(
        '[[engine]]\nname = "chat"\nunit = "vllm@chat.service"\n[[engine]]\nname = "embed"\nport = 8001',
        {
            "OOMWATCH_ENGINE__1__PORT": "9001",
            "OOMWATCH_ENGINE__2__NAME": "extra",
            "OOMWATCH_ENGINE__2__METRICS_URL": "http://10.0.0.2:8000/metrics",
        },
    )
    chat, embed, extra = loaded.config.engines
    assert (chat.name, chat.unit, chat.kind) == ("chat", "vllm@chat.service", "auto")
    assert (embed.name, embed.port) == ("embed", 9001)
    assert extra.metrics_url == "http://10.0.0.2:8000/metrics"
    assert loaded.origins["engine.0.name"].layer == "file"
    assert loaded.origins["engine.1.port"].layer == "environment"


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[agent]\nsampling_interval = 30", 'agent.sampling_interval needs a unit: write "30s"'),
        ('[agent]\nsampling_interval = "30"', "agent.sampling_interval needs a unit"),
        ('[agent]\nsampling_interval = "soon"', "agent.sampling_interval must be a duration"),
        ('[agent]\nsampling_interval = "1h"', 'must be between "100ms" and "1min", not "1h"'),
        ("[agent]\nqueue_size = 1.5", "agent.queue_size must be a whole number, not 1.5"),
        ("[agent]\nqueue_size = true", "agent.queue_size must be a whole number, not true"),
        ("[agent]\nqueue_size = nan", "agent.queue_size must be a whole number"),
        ('[agent]\nburst_on = "start"', "agent.burst_on must be a list"),
        ('[agent]\nburst_on = ["strat"]', 'agent.burst_on must be one of "start"'),
        ('[agent]\nlog_level = "loud"', 'agent.log_level must be one of "debug"'),
        ("[store]\nmax_size = 1000000", 'store.max_size needs a unit: write "1000000MiB"'),
        ('[store]\nmax_size = "1TB extra"', "store.max_size must be a size with a unit"),
        ('[store]\npath = "oomwatch.db"', "store.path must be an absolute path"),
        ('[store]\npath = "/a\\u001bb"', "store.path must be one line of text"),
        ('[store]\nurl = "mysql://h/db"', "store.url must be a URL such as"),
        ("[detect.kv_saturation]\nwarn = 85", "from 0 to 1, not 85; 85 % is 0.85"),
        ('[detect.kv_saturation]\nwarn = "0.9"', "detect.kv_saturation.warn must be a number"),
        ("[sources]\nnvml = 1", "sources.nvml must be true or false, not 1"),
        ('[sources]\nnvml = "yes"', "sources.nvml must be true or false"),
        ("[sources]\nnvml = 2024-01-01", "sources.nvml must be true or false, not 2024-01-01"),
        ("sources = 1", "sources must be a table, written [sources]"),
        ('[engine]\nname = "a"', "engine must be written [[engine]]"),
        ("engine = [1]", "engine must be written [[engine]]"),
        ("[[engine]]\nport = 8000", "engine.0.name is missing"),
        ('[[engine]]\nname = "a"', "engine.0 (a).name has nothing to find the engine by"),
        (
            '[[engine]]\nname = "a b"\nport = 1',
            'engine.0.name must look like "chat-70b", not like "a b"',
        ),
        ('[[engine]]\nname = "a"\nport = 0', "engine.0 (a).port must be a whole number from 1"),
        (
            '[[engine]]\nname = "a"\nmetrics_url = "h:8000"',
            "engine.0 (a).metrics_url must be a URL",
        ),
        ('[[engine]]\nname = "a"\nmetrics_url = "http://h:x/"', "engine.0 (a).metrics_url must be"),
        ('[[engine]]\nname = "a"\nmetrics_url = "http:///m"', "engine.0 (a).metrics_url must be"),
        (
            '[[engine]]\nname = "a"\npod = "chat"',
            'must look like "inference/chat-0", not like "chat"',
        ),
        (
            '[[engine]]\nname = "a"\nport = 1\n[[engine]]\nname = "a"\nport = 2',
            "engine.1 (a).name a is taken by an earlier [[engine]]",
        ),
        ("schema_version = 2", "schema_version must be 1 for this oomwatch; upgrade oomwatch"),
        ('schema_version = "1"', "schema_version must be 1"),
        ("schema_version = true", "schema_version must be 1"),
    ],
)
def test_a_mistake_names_its_key_and_file(load, tmp_path, text, expected):
    (problem,) = problems(load, text)
    assert expected in problem
    assert problem.startswith(f"{tmp_path / 'config.toml'}: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[agent]\nburst_interval = "2s"', "agent.burst_interval must not be longer than"),
        ("[detect.kv_saturation]\nwarn = 0.7", "detect.kv_saturation.warn must lie above clear"),
        ("[detect.kv_saturation]\nwarn = 0.99", "detect.kv_saturation.warn must lie above clear"),
        ("[detect.host_headroom]\nwarn = 0.2", "detect.host_headroom.warn must lie below clear"),
        ('[detect.gpu_headroom]\nwarn = "2GiB"', "detect.gpu_headroom.warn must lie below clear"),
        (
            "[detect.preemption_storm]\nwarn_per_minute = 1",
            "warn_per_minute must lie above clear_per_minute",
        ),
        ('[store]\nraw_retention = "8d"', "store.ten_second_retention must not be shorter"),
        (
            '[store]\npath = "/a.db"\nurl = "postgresql://h/d"',
            "store.url cannot be given together with store.path",
        ),
        ('[incidents]\nlog_excerpt = "10B"', 'incidents.log_excerpt must be "0B" for none'),
        (
            '[store]\nraw_retention = "10min"\n[incidents]\nwindow_before = "20min"',
            "incidents.window_before must not be longer than store.raw_retention",
        ),
        ('[forecast]\nwindow = "2d"', "forecast.window must not be longer than"),
        (
            '[[notify.alertmanager]]\nname = "a"\nurls = ["http://am:9093/?token=s3cret"]',
            "notify.alertmanager.0 (a).urls must not hold a password or a query: put",
        ),
    ],
)
def test_values_must_go_together(load, text, expected):
    (problem,) = problems(load, text)
    assert expected in problem


def test_all_mistakes_are_told_the_first_in_the_message(load):
    with pytest.raises(ConfigError) as caught:
        load("[agent]\nsampling_interval = 1\nburst_hold = 2", {"OOMWATCH_SOURCES__NVML": "maybe"})
    assert len(caught.value.problems) == 3
    assert "OOMWATCH_SOURCES__NVML: sources.nvml must be true or false" in caught.value.problems[2]
    assert str(caught.value).endswith("(and 2 more: see `oomwatch config check`)")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"[agent\nx = 1", "at line 1, column 7"),
        (b"[agent]\nx = = 1", "at line 2, column 5"),
        (b"[agent]\nx = [1, 2", "at line 2, column 10, the end of the file"),
        (b"[agent]\nburst_hold = '\xff'", "is not UTF-8 (at line 2, column 15)"),
        (b"[agent]\na = 1\na = 2", "at line 3"),
        (b"a=" + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_syntax_error_says_where(load, text, place):
    (problem,) = problems(load, text)
    assert place in problem


def test_a_byte_order_mark_is_let_be(load):
    loaded = load(b'\xef\xbb\xbf[agent]\r\nsampling_interval = "2s"\r\n')
    assert loaded.config.agent.sampling_interval_seconds == 2.0


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        (
            '[agent]\nsampling_intervall = "1s"',
            {},
            "agent.sampling_intervall is not known; did you mean agent.sampling_interval?",
        ),
        ("[detect]\nkv_horizon = 1", {}, "did you mean forecast.kv_horizon?"),
        ("[agnet]\nx = 1", {}, "agnet is not known; did you mean agent?"),
        ("[kv_saturation]\nwarn = 1", {}, "did you mean detect.kv_saturation?"),
        ("zzz = 1", {}, "zzz is not known"),
        ('[[engine]]\nname = "a"\nport = 1\nurl = "x"', {}, "engine.0 (a).url is not known"),
        (
            '[[notify.slack]]\nurl = "https://hooks.slack.com/s3cret"\nname = "a"',
            {},
            "notify.slack.0 (a).url is not known; name a file that holds it as url_file",
        ),
        (
            '[[notify.email]]\nname = "a"\nserver = "s"\nsender = "a@b"\nrecipients = ["a@b"]\n'
            'password = "s3cret"',
            {},
            "name a file that holds it as password_file",
        ),
        ("", {"OOMWATCH_AGENT__SAMPLING": "1s"}, "agent.sampling is not known"),
        ("", {"OOMWATCH_AGNT__X": "1"}, "agnt.x is not known; did you mean agent?"),
        (
            "",
            {"OOMWATCH_AGENT_SAMPLING_INTERVAL": "1s"},
            "did you mean OOMWATCH_AGENT__SAMPLING_INTERVAL?",
        ),
        ("", {"OOMWATCH_ENGINE__PORT": "1"}, "engine.port is not known"),
        ("", {"OOMWATCH_ENGINE__99999999999__PORT": "1"}, "is not known"),
        ("", {"OOMWATCH_SCHEMA_VERSION__": "1"}, "is not known"),
    ],
)
def test_an_unknown_key_warns_and_is_a_mistake_when_strict(load, text, environ, expected):
    loaded = load(text, environ)
    (warning,) = loaded.warnings
    assert expected in warning
    assert "s3cret" not in warning
    assert loaded.config.agent == Config().agent
    (problem,) = problems(load, text, environ, strict=True)
    assert problem == warning


def test_other_variables_are_left_alone(load):
    assert load("", {"OOMWATCH_CONFIG": "", "OOMWATCH_UPDATE_GOLDEN": "1"}).warnings == ()


def test_a_gap_between_numbered_engines(load):
    environ = {"OOMWATCH_ENGINE__1__NAME": "a", "OOMWATCH_ENGINE__1__PORT": "1"}
    (problem,) = problems(load, "", environ)
    assert "engine numbers must follow each other from 0, not be 1" in problem


def test_unknown_overrides_warn(load):
    loaded = load(overrides={"agent.sampling": "1s", "store.size": 5, "agent.queue_size": 200})
    assert len(loaded.warnings) == 2
    assert loaded.config.agent.queue_size == 200


json_values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([numbered(path) for path, _ in all_keys()]), json_values, st.booleans())
def test_any_value_is_read_or_a_mistake_of_one_line(name, value, as_text):
    """Nothing that a key is given ends in another error, and what is read can be shown."""
    try:
        loaded = load_config(
            os.devnull, environ={}, overrides={name: str(value) if as_text else value}
        )
    except ConfigError as error:
        lines = str(error).splitlines()
    else:
        tomllib.loads(merged_toml(loaded.config, loaded.origins))
        lines = [""]
    assert len(lines) == 1


# ---------------------------------------------------------------- secrets
def test_a_secret_in_the_file_is_warned_of_and_never_shown(load):
    loaded = load("""
        [store]
        url = "postgresql://oomwatch:s3cret-a@db/oomwatch"
        [[engine]]
        name = "a"
        metrics_url = "http://u:s3cret-b@h:8000/metrics?token=s3cret-c"
        headers = { Authorization = "Bearer s3cret-d", X-Tenant = "s3cret-e" }
    """)
    assert len(loaded.warnings) == 3
    assert "store.url holds a secret" in loaded.warnings[0]
    assert "name it as url_file" in loaded.warnings[0]
    shown = [
        merged_toml(loaded.config, loaded.origins),
        json.dumps(merged_json(loaded.config, loaded.origins)),
        repr(loaded),
        *loaded.warnings,
    ]
    assert "s3cret" not in "".join(shown)
    assert engine_headers(loaded.config.engines[0], {})["Authorization"] == "Bearer s3cret-d"
    assert store_address(loaded.config, {}).endswith("s3cret-a@db/oomwatch")


def test_harmless_headers_and_secrets_of_the_environment_are_not_warned_of(load):
    loaded = load(
        '[[engine]]\nname = "a"\nport = 1\nheaders = { X-Tenant = "a" }',
        {"OOMWATCH_STORE__URL": "postgresql://u:p@h/d"},
    )
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("headers_file", '"Bearer s3cret"'),
        ("headers_file", '"s3cret!"'),
        ("headers_file", '"s3/cret"'),
        ("headers_file", '["s3cret"]'),
        ("headers", '"Authorization s3cret"'),
        ("headers", '{ Authorization = "s3cret\\nX: y" }'),
        ("metrics_url", '"ftp://u:s3cret@h/"'),
        ("headers_file", '"xoxb-123-s3cret"'),
        ("headers_file", '"whsec_s3cret"'),
        ("headers_file", '"0123456789abcdef0123456789s3cret"'),
        ("labels", '"http://u:s3cret@h/"'),
    ],
)
def test_a_mistake_does_not_repeat_a_secret(load, key, value):
    (problem,) = problems(load, f'[[engine]]\nname = "a"\nport = 1\n{key} = {value}')
    assert f"engine.0 (a).{key}" in problem
    assert "cret" not in problem.replace("secret", "")


def test_secrets_of_files_and_credentials(load, tmp_path):
    (tmp_path / "chat-headers").write_text("Authorization: Bearer abc\n")
    (tmp_path / "url").write_text("postgresql://u:p@h/d\n")
    config = load(f"""
        [store]
        url_file = "{tmp_path}/url"
        [[engine]]
        name = "chat"
        port = 8000
        headers = {{ X-Tenant = "a" }}
        headers_file = "chat-headers"
    """).config
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert engine_headers(config.engines[0], environ) == {
        "X-Tenant": "a",
        "Authorization": "Bearer abc",
    }
    assert store_address(config, environ) == "postgresql://u:p@h/d"
    with pytest.raises(ConfigError, match="names the credential chat-headers, and systemd passed"):
        engine_headers(config.engines[0], {})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"x" * 70_000, "too large"),
    ],
)
def test_a_secret_that_cannot_be_read(tmp_path, content, expected):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_secret(str(path), "store.url_file")
    assert str(caught.value).startswith("store.url_file: ")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_secret_that_is_no_file_is_not_waited_for(tmp_path, make):
    path = tmp_path / "secret"
    make(path)
    with pytest.raises(ConfigError, match=r"store\.url_file: .* not a regular file"):
        read_secret(str(path), "store.url_file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_secret_that_may_not_be_read_says_by_whom_and_what_helps(tmp_path):
    path = tmp_path / "slack-url"
    path.write_text("s3cret")
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError) as caught:
            read_secret(str(path), "url_file of receiver a")
    finally:
        os.seteuid(0)
    assert re.search(r"slack-url may not be read by the user (nobody|65534); ", str(caught.value))
    assert f"LoadCredential=slack-url:{path}, and write slack-url here" in str(caught.value)


@pytest.mark.parametrize("line", ["Bearer s3cret", "Authorization: Bearer s3cret\u0442"])
def test_a_headers_file_that_is_none(load, tmp_path, line):
    (tmp_path / "h").write_text(f"{line}\n")
    text = f'[[engine]]\nname = "a"\nport = 1\nheaders_file = "{tmp_path}/h"'
    with pytest.raises(ConfigError, match="number 1") as caught:
        engine_headers(load(text).config.engines[0], {})
    assert "s3cret" not in str(caught.value)


# ---------------------------------------------------------------- places
def test_where_the_file_is_looked_for():
    system = Path("/etc/oomwatch/config.toml")
    assert config_paths({"HOME": "/home/u"}) == (
        system,
        Path("/home/u/.config/oomwatch/config.toml"),
    )
    assert config_paths({"HOME": "/home/u", "XDG_CONFIG_HOME": "/x"})[1] == Path(
        "/x/oomwatch/config.toml"
    )
    assert config_paths({"HOME": "/home/u", "XDG_CONFIG_HOME": "relative"})[1] == Path(
        "/home/u/.config/oomwatch/config.toml"
    )
    assert config_paths({}) == (system,)
    assert config_paths({"CONFIGURATION_DIRECTORY": "/etc/oomwatch:/etc/b", "HOME": "/u"}) == (
        system,
    )


def test_where_the_database_is():
    assert default_store({"STATE_DIRECTORY": "/var/lib/private/oomwatch:/x"}) == Path(
        "/var/lib/private/oomwatch/oomwatch.db"
    )
    expected = "/var/lib" if os.geteuid() == 0 else "/state"
    assert default_store({"XDG_STATE_HOME": "/state"}) == Path(f"{expected}/oomwatch/oomwatch.db")
    assert store_address(Config(), {"STATE_DIRECTORY": "/s"}) == "/s/oomwatch.db"


def test_a_file_that_was_named_must_be_there(tmp_path):
    missing = tmp_path / "missing.toml"
    for path, environ in ((missing, {}), (None, {"OOMWATCH_CONFIG": str(missing)})):
        with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: no such file"):
            load_config(path, environ=environ)
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path, environ={})


def test_the_usual_places_may_be_empty(tmp_path):
    environ = {"CONFIGURATION_DIRECTORY": str(tmp_path)}
    assert load_config(environ=environ).path is None
    (tmp_path / "config.toml").write_text("[agent]\nqueue_size = 123")
    loaded = load_config(environ=environ)
    assert loaded.path == tmp_path / "config.toml"
    assert loaded.config.agent.queue_size == 123


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_service_says_that_it_may_not_read_its_file(tmp_path):
    path = tmp_path / "config.toml"
    path.touch(mode=0o000)
    with pytest.raises(ConfigError, match="permission denied"):
        load_config(environ={"CONFIGURATION_DIRECTORY": str(tmp_path)})


# ---------------------------------------------------------------- file, classes and docs agree
def test_the_example_file_is_the_one_made_from_the_classes():
    path = ROOT / "config.example.toml"
    if os.environ.get("OOMWATCH_UPDATE_GOLDEN") == "1":
        path.write_text(example_toml(), "utf-8")
    assert path.read_text("utf-8") == example_toml(), "OOMWATCH_UPDATE_GOLDEN=1 rewrites it"


def test_the_example_file_as_it_is_changes_nothing(load):
    loaded = load(example_toml())
    assert loaded.config == Config()
    assert loaded.warnings == ()


def test_the_example_file_with_every_default_taken_over_is_the_default(load):
    """Each line that is commented out is right, and says what happens without it."""
    unset = {key.name for _, key in all_keys() if key.default is None or key.default == {}}
    lines = [
        line[1:] if re.match(r"#\w", line) and line.split(" ")[0][1:] not in unset else line
        for paragraph in example_toml().split("\n\n")
        if "#[[" not in paragraph  # a table that may be there many times, or not at all
        for line in paragraph.splitlines()
    ]
    text = "\n".join(lines)
    loaded = load(text, strict=True)
    assert loaded.config == Config()
    in_file = {name for name, origin in loaded.origins.items() if origin.layer == "file"}
    assert in_file == {
        dotted(path)
        for path, key in all_keys()
        if key.name not in unset and path[:-1] not in REPEATED
    }


@pytest.mark.parametrize("kind", SINKS)
def test_the_example_of_each_receiver_is_right(load, kind):
    """All keys of its paragraph at once, but for those that exclude each other."""
    head = f"#[[notify.{kind}]]"
    paragraph = next(part for part in example_toml().split("\n\n") if head in part)
    either = {"url", "url_file", "token_file", "channel", "proxy"}
    lines = [line[1:] for line in paragraph.splitlines() if re.match(r"#\w", line)]
    kept = [line for line in lines if line.split(" ")[0] not in either]
    loaded = load(f"[[notify.{kind}]]\n" + "\n".join(kept), strict=True)
    (example,) = loaded.config.notify.sinks
    assert type(example) is SINKS[kind]
    assert example.name == "oncall"
    assert loaded.warnings == ()
    # What all receivers share is told once.
    assert example.quiet_hours == ("22:00-07:00" if kind == "slack" else None)
    assert ("[[notify.slack]]" in paragraph.partition(head)[0]) == (kind != "slack")


def test_receivers_are_told_apart_by_name(load):
    one = '[[notify.webhook]]\nname = "a"\nurl = "http://h/x"\n'
    (problem,) = problems(load, one + '[[notify.slack]]\nname = "a"\n')
    assert "notify.webhook.0 (a).name a is taken by an earlier receiver" in problem
    (problem,) = problems(load, '[[notify.slack]]\nmin_severity = "info"')
    assert "notify.slack.0.name is missing" in problem


@pytest.mark.parametrize(
    ("first", "second", "part"), [("hook", "Hook", "HOOK"), ("on-call", "on.call", "ON_CALL")]
)
def test_receivers_do_not_share_the_variables_of_their_secrets(load, first, second, part):
    one = '[[notify.webhook]]\nname = "{}"\nurl = "http://h/x"\n'
    (problem,) = problems(load, one.format(first) + one.format(second))
    assert f"notify.webhook.1 ({second}).name {second} is too like the earlier receiver" in problem
    assert f"{first}: OOMWATCH_NOTIFY_{part}_" in problem
    assert load(one.format(first) + one.format(f"{second}2"), strict=True)


def test_quiet_hours_have_a_length(load):
    text = '[[notify.slack]]\nname = "a"\nquiet_hours = "22:00-{}"\n'
    (problem,) = problems(load, text.format("22:00"))
    assert "notify.slack.0 (a).quiet_hours begin and end at 22:00" in problem
    assert load(text.format("22:01"), strict=True)


def test_labels_come_from_tables_and_from_text(load):
    text = '[notify]\nlabels = { site = "fra1" }\n[[engine]]\nname = "a"\nport = 1\n'
    loaded = load(text, {"OOMWATCH_ENGINE__0__LABELS": "team=chat, tier = gold"})
    assert loaded.config.notify.labels == {"site": "fra1"}
    assert loaded.config.engines[0].labels == {"team": "chat", "tier": "gold"}
    shown = {entry["key"]: entry["value"] for entry in merged_json(loaded.config, loaded.origins)}
    assert shown["engine.0.labels"] == {"team": "chat", "tier": "gold"}
    for wrong in ('{ "a b" = "c" }', '{ a = "" }', "{ a = 1 }", '"a"', '{ a = "b\\nc" }'):
        (problem,) = problems(load, f"[notify]\nlabels = {wrong}")
        assert "notify.labels" in problem


def test_the_examples_of_keys_without_a_default_are_right(load):
    engine = example_toml().partition("#[[engine]]")[2].partition("\n\n")[0]
    lines = [line[1:] for line in engine.splitlines() if re.match(r"#\w", line)]
    (example,) = load("[[engine]]\n" + "\n".join(lines), strict=True).config.engines
    assert all(getattr(example, field.name) for field in dataclasses.fields(example))
    for path, key in all_keys():
        if path[0] == "store" and key.default is None:
            load(f"[store]\n{key.name} = {key.example}", strict=True)


def test_the_reference_in_the_documentation():
    path = ROOT / "docs" / "configuration.md"
    head, marker, rest = path.read_text("utf-8").partition("<!-- keys -->\n")
    assert marker
    if os.environ.get("OOMWATCH_UPDATE_GOLDEN") == "1":
        path.write_text(head + marker + reference(), "utf-8")
        rest = reference()
    assert rest == reference(), "OOMWATCH_UPDATE_GOLDEN=1 rewrites it"


def test_every_key_says_what_it_means():
    for path, key in all_keys():
        assert key.doc.endswith("."), dotted(path)
        if key.default is not None and key.default != {}:
            written = tomllib.loads(f"x = {key.kind.show(key.default)}")["x"]
            assert key.kind.read(written, text=False) == key.default, dotted(path)
        else:
            assert key.example, dotted(path)


def test_names_of_fields_carry_their_units():
    for _, key in all_keys():
        assert key.field == key.name + key.kind.suffix


def test_the_walk_over_a_configuration_meets_every_key():
    walked = {dotted(path) for path, _, _ in in_force(Config())}
    assert walked == {dotted(path) for path, _ in all_keys() if path[:-1] not in REPEATED}
    assert all(isinstance(member, Key) or member.cls for member in members(Config))


# ---------------------------------------------------------------- the command
def run(*arguments, **environ):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OOMWATCH_")}
    code = (
        "import sys; from oomwatch.cli import config; from oomwatch import __main__ as m\n"
        "import oomwatch.cli as c; c.COMMANDS.setdefault('config', 'x')\n"
        "m.main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "config", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean | environ,
    )


def test_show_prints_what_would_give_the_same_again(tmp_path, load):
    path = tmp_path / "own.toml"
    path.write_text('[agent]\nsampling_interval = "2s"\n[[engine]]\nname = "a"\nport = 8000\n')
    done = run("show", "--config", str(path), OOMWATCH_AGENT__QUEUE_SIZE="777")
    assert done.returncode == 0
    assert f'sampling_interval = "2s"  # {path}' in done.stdout
    assert "queue_size = 777  # OOMWATCH_AGENT__QUEUE_SIZE" in done.stdout
    assert 'burst_hold = "30s"  # default' in done.stdout
    again = load(done.stdout, strict=True).config
    assert again == load_config(path, environ={"OOMWATCH_AGENT__QUEUE_SIZE": "777"}).config


def test_show_as_json(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[store]\nmax_size = "1GiB"\nsize = 1')
    document = json.loads(run("show", "--config", str(path), "--json").stdout)
    assert document["schema"] == "oomwatch.config/1"
    assert document["file"] == str(path)
    assert "did you mean" in document["warnings"][0] or "not known" in document["warnings"][0]
    by_key = {entry["key"]: entry for entry in document["settings"]}
    assert by_key["store.max_size"] == {
        "key": "store.max_size",
        "value": 1024**3,
        "unit": "bytes",
        "text": '"1GiB"',
        "origin": "file",
        "where": str(path),
        "variable": "OOMWATCH_STORE__MAX_SIZE",
    }
    assert by_key["store.path"]["value"] is None


@pytest.mark.parametrize(
    ("text", "flags", "status", "expected"),
    [
        ("", (), 0, "own.toml: right\n"),
        ("[agent]\nx = 1", (), 0, "own.toml: right, with 1 warning\n"),
        ("[agent]\nx = 1\ny = 2", (), 0, "right, with 2 warnings\n"),
        ("[agent]\nx = 1", (), 0, "warning: "),
        ("[agent]\nx = 1", ("--strict",), 2, "agent.x is not known"),
        ("[agent]\nsampling_interval = 1\nburst_hold = 2", (), 2, "agent.burst_hold needs a unit"),
        ("[agent", (), 2, "line 1, column 7"),
        ('[store]\nurl_file = "/no/such/file"', (), 0, "store.url_file: /no/such/file cannot"),
        ('[[engine]]\nname="a"\nport=1\nheaders_file = "/no/h"', (), 0, "/no/h cannot be read"),
        (
            '[[notify.slack]]\nname="a"\nurl_file = "/no/u"',
            (),
            0,
            "warning: url_file of receiver a",
        ),
        (
            '[[notify.slack]]\nname="a"\nenabled = false\ncauses = ["kv_saturatoin"]',
            (),
            0,
            "warning: causes of receiver a: there is no cause 'kv_saturatoin'; did you mean "
            "kv_saturation?",
        ),
        (
            '[[notify.slack]]\nname="a"\ncauses = ["kv_saturatoin"]',
            ("--strict",),
            2,
            "oomwatch: causes of receiver a: there is no cause",
        ),
        (
            '[[notify.slack]]\nname="a"',
            ("--strict",),
            2,
            "oomwatch: receiver a has no url_file; name a file that holds it, or set",
        ),
        (
            '[[engine]]\nname="a"\nmetrics_url="http://h/metrics"\nheaders_file = "/no/h"',
            ("--strict",),
            2,
            "oomwatch: headers_file of engine a: /no/h cannot be read",
        ),
        (
            '[[notify.slack]]\nname="a"\nurl_file = "slack-url"',
            ("--strict",),
            0,
            "warning: url_file of receiver a names the credential slack-url, and systemd passed",
        ),
        (
            '[notify]\nrunbook_url = "https://w/{host}/{cause}"',
            (),
            2,
            "notify.runbook_url has {host} in it: only {cause} is filled in",
        ),
        ('[export]\nusers_file = "/no/u"', (), 0, "warning: export.users_file: /no/u cannot be"),
        (
            '[export]\ntls_certificate_file = "/no/c"\ntls_key_file = "/no/k"',
            (),
            0,
            "warning: export.tls_certificate_file, export.tls_key_file: no such file",
        ),
        (
            '[export.otlp]\nenabled = true\nheaders_file = "/no/h"',
            (),
            0,
            "warning: export.otlp.headers_file: /no/h cannot be read",
        ),
        (
            '[export]\ntextfile = "/no/folder/oomwatch.prom"',
            (),
            0,
            "warning: export.textfile: there is no folder /no/folder",
        ),
        (
            '[export]\nlisten = ["0.0.0.0:20666", "127.0.0.1:1", "unix:/run/m.sock"]',
            (),
            0,
            "warning: export.listen: whoever reaches 0.0.0.0:20666 can read the metrics",
        ),
    ],
)
def test_check(tmp_path, text, flags, status, expected):
    path = tmp_path / "own.toml"
    path.write_text(text)
    done = run("check", "--config", str(path), *flags)
    assert done.returncode == status
    assert expected in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    as_json = run("check", "--config", str(path), *flags, "--json")
    assert as_json.returncode == status
    document = json.loads(as_json.stdout)
    assert document["valid"] is (status == 0)
    assert len(document["warnings"]) == done.stderr.count("warning: ")


def test_check_finds_secrets_that_everybody_may_read(tmp_path):
    secret = tmp_path / "url"
    secret.write_text("https://h.example/s3cret\n")
    path = tmp_path / "own.toml"
    path.write_text(f'[[notify.webhook]]\nname = "hook"\nurl_file = "{secret}"\n')
    secret.chmod(0o644)
    done = run("check", "--config", str(path))
    assert f"notify.webhook.0 (hook).url_file: everybody on this host can read {secret}" in (
        done.stderr
    )
    assert "s3cret" not in done.stderr
    secret.chmod(0o640)
    assert "everybody" not in run("check", "--config", str(path)).stderr


def test_default_is_the_example_file():
    done = run("default")
    assert done.stdout == example_toml()
    keys = {entry["key"] for entry in json.loads(run("default", "--json").stdout)["settings"]}
    assert keys == {dotted(path) for path, _ in all_keys() if path[:-1] not in REPEATED}


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('"\\u001b[31mred" = 1\n[agent]\nlog_level = "\\u001b[2J"')
    done = run("check", "--config", str(path))
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr
