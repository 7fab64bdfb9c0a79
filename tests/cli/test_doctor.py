"""``weftplan doctor`` and the command group."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

import weftplan
from tests import standin_cupy
from weftplan import cli, config
from weftplan.cli.doctor.command import _lines, environment_markdown
from weftplan.cli.doctor.diagnosis import diagnose
from weftplan.default_settings import TABLE
from weftplan.errors import ShapeError
from weftplan.support import blas_threads

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str | None):
    """Run the command line in this process with these environment variables; return click's result."""
    return CliRunner().invoke(cli.main, arguments, env=environment, prog_name="weftplan")


class TestDoctor:
    """The doctor's report."""

    def test_json_holds_every_variable(self):
        """``--json`` prints one object with the value, origin and effect of each variable, and nothing else."""
        result = run("doctor", "--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert [row["name"] for row in report["variables"]] == [variable.name for variable in config.table()]
        for row in report["variables"]:
            assert row["effect"]
            assert row["error"] is None
        assert report["problems"] == []
        assert report["weftplan"] == weftplan.__version__

    def test_origin(self):
        """A value's origin is the default, the environment or the alias that set it."""
        result = run("doctor", "--json", MXNET_CPU_WORKER_NTHREADS="3", NNVM_EXEC_NUM_TEMP="2")
        rows = {row["name"]: row for row in json.loads(result.stdout)["variables"]}
        assert (rows["MXNET_CPU_WORKER_NTHREADS"]["value"], rows["MXNET_CPU_WORKER_NTHREADS"]["origin"]) == (
            3,
            "environment",
        )
        assert (rows["MXNET_EXEC_NUM_TEMP"]["value"], rows["MXNET_EXEC_NUM_TEMP"]["origin"]) == (
            2,
            "alias NNVM_EXEC_NUM_TEMP",
        )
        assert rows["MXNET_GPU_COPY_NTHREADS"]["origin"] == "default"

    def test_bad_values_are_all_reported(self):
        """Each bad value is reported, the others are shown, and the exit code is 1."""
        result = run(
            "doctor", MXNET_CPU_WORKER_NTHREADS="0", MXNET_ENGINE_TYPE="Fast", COLUMNS="200", WEFTPLAN_PROGRESS=None
        )
        assert result.exit_code == 1
        assert "MXNET_CPU_WORKER_NTHREADS='0' is not legal" in result.output
        assert "MXNET_ENGINE_TYPE='Fast' is not legal" in result.output
        assert f"the other {len(TABLE) - 2} have their defaults" in result.output
        assert "MXNET_EXEC_MATCH_RANGE" not in result.output
        assert "MXNET_EXEC_MATCH_RANGE = " in run("doctor", "--all").output
        report = json.loads(run("doctor", "--json", MXNET_CPU_WORKER_NTHREADS="0").stdout)
        assert len(report["problems"]) == 1
        assert report["load"]["threads_per_context"] is None

    def test_misspelt_names(self):
        """An unknown variable is reported with the nearest name; the exit code is 0."""
        result = run("doctor", MXNET_EXEC_NUM_TMP="2", COLUMNS="200")
        assert result.exit_code == 0, result.output
        assert "unknown variable MXNET_EXEC_NUM_TMP, ignored: did you mean MXNET_EXEC_NUM_TEMP?" in result.output

    def test_extras_are_named_in_full(self, monkeypatch: pytest.MonkeyPatch):
        """Without CuPy the text names the extras to install, with their brackets."""
        monkeypatch.setitem(sys.modules, "cupy", None)
        result = run("doctor", COLUMNS="200")
        assert "pip install 'weftplan[cuda12]' or 'weftplan[cuda13]'" in result.output

    def test_libraries_of_a_gpu(self):
        """The report shows CUDA libraries, also missing ones, and peer access between GPUs."""
        with standin_cupy.installed():
            report = json.loads(run("doctor", "--json").stdout)["cupy"]
            assert (report["gpus"], report["libraries"]["NVRTC"], report["note"]) == (4, "12.9", "")
            assert report["libraries"]["cuDNN"].startswith("missing")
            assert report["peers"][0] == ["", "peer access", "peer access", "peer access"]
        with standin_cupy.installed():
            standin_cupy.machine.apart.add((0, 2))
            told = run("doctor", COLUMNS="200").output
            assert "gpu(0) copies to" in told
            assert "gpu(1), gpu(3): peer access; gpu(2): the driver offers no peer access" in told
        with standin_cupy.installed():
            standin_cupy.machine.libraries_missing = True
            text = run("doctor", COLUMNS="300").output
        assert "cuBLAS, cuRAND, NVRTC cannot be used, so kernels will not run: pip install 'weftplan[cuda12]'" in text

    def test_who_has_how_many_threads(self):
        """The report counts the threads of BLAS, engine and store, and the contexts that the CPUs can serve."""
        report = json.loads(run("doctor", "--json", MXNET_CPU_WORKER_NTHREADS="1000").stdout)
        owners = {row["who"]: row["count"] for row in report["threads"]}
        assert owners["engine: CPU workers"] == 1000
        assert owners["kvstore: reduction"] == 4
        assert [row["threads"] for row in report["numpy"]["blas"] if row["api"] == "blas"]
        assert report["load"]["contexts_that_fit"] == 0
        assert report["load"]["threads_per_context"] % 1000 == 0

    def test_names_are_never_broken(self):
        """On 80 columns no line is wider and no variable name is broken."""
        lines = _lines(diagnose(), 80, every=True)
        assert max(map(len, lines)) <= 80
        text = "\n".join(lines)
        assert all(variable.name in text for variable in config.table())

    def test_contexts(self):
        """cpu(0) is usable and has free and total memory; gpu(0) is usable or has a note with the reason."""
        rows = {row["context"]: row for row in json.loads(run("doctor", "--json").stdout)["contexts"]}
        assert rows["cpu(0)"]["usable"]
        assert 0 < rows["cpu(0)"]["free_bytes"] <= rows["cpu(0)"]["total_bytes"]
        assert rows["gpu(0)"]["usable"] or rows["gpu(0)"]["note"]

    def test_usable_cpus(self):
        """At least one CPU is usable."""
        assert blas_threads.usable_cpus() >= 1

    def test_page_of_variables_is_current(self):
        """``doctor --markdown`` prints the page docs/environment.md."""
        assert run("doctor", "--markdown").stdout == environment_markdown()


class TestGroup:
    """The command group, which imports subcommands on first use."""

    def test_version(self):
        """``--version`` prints the package's version."""
        assert run("--version").output.strip() == f"weftplan, version {weftplan.__version__}"

    def test_help_lists_without_importing(self, monkeypatch: pytest.MonkeyPatch):
        """``--help`` lists the subcommands without importing them."""
        monkeypatch.delitem(sys.modules, "weftplan.cli.doctor.command", raising=False)
        result = run("--help")
        assert result.exit_code == 0
        assert "doctor" in result.output
        assert "weftplan.cli.doctor.command" not in sys.modules

    def test_unknown_command(self):
        """A misspelt subcommand exits with 2; the error suggests the nearest name."""
        result = run("docter")
        assert result.exit_code == 2
        assert "no command 'docter': did you mean 'doctor'?" in result.output

    def test_absent_module_is_an_absent_command(self, monkeypatch: pytest.MonkeyPatch):
        """A subcommand without a module is not listed and exits with 2."""
        monkeypatch.setitem(cli._COMMANDS, "frobnicate", "Not written.")
        assert "frobnicate" not in run("--help").output
        assert run("frobnicate").exit_code == 2

    def test_missing_package_breaks_only_its_command(self, monkeypatch: pytest.MonkeyPatch):
        """A subcommand whose import fails exits with 1 and the reason; other subcommands work."""
        monkeypatch.setitem(cli._COMMANDS, "broken", "Needs a package that is not there.")
        find_spec, import_module = cli.importlib.util.find_spec, cli.importlib.import_module
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name.endswith("broken") or find_spec(name))

        def fail(name: str) -> ModuleType:
            if name.endswith(".broken"):
                raise ModuleNotFoundError("No module named 'frob'", name="frob")
            return import_module(name)

        monkeypatch.setattr(cli.importlib, "import_module", fail)
        result = run("broken", "--anything", "x")
        assert result.exit_code == 1
        assert "`weftplan broken` cannot be loaded: No module named 'frob'" in result.output
        assert run("doctor", "--markdown").exit_code == 0

    def test_errors_of_weftplan_are_messages(self, monkeypatch: pytest.MonkeyPatch):
        """An MXNetError in a subcommand prints its message and exits with 1, without a traceback."""

        @click.command("doctor")
        def command() -> None:
            raise ShapeError("fc1: expected (2, 3), got (3, 2)")

        monkeypatch.setattr("weftplan.cli.doctor.command.command", command)
        result = run("doctor")
        assert (result.exit_code, result.output) == (1, "Error: fc1: expected (2, 3), got (3, 2)\n")


def test_a_limit_of_blas_replaces_the_threads_that_it_would_start(monkeypatch):
    """The threads of a busy context are workers times the limit of BLAS, or times BLAS's own number without a limit."""
    from weftplan.cli.doctor import diagnosis

    monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "2")
    monkeypatch.setattr(diagnosis, "_native", lambda blas: 8)
    for limit, threads in ((1, 2), (None, 16)):
        monkeypatch.setattr(diagnosis, "_blas_limit", lambda limit=limit: (limit, "OPENBLAS_NUM_THREADS"))
        assert diagnosis._load(16, [])["threads_per_context"] == threads
