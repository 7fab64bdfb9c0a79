"""The table of environment variables and its reader: legal values, bad values, aliases and warnings."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import sources
from tests.support.together import together
from weftplan import config
from weftplan.default_settings import TABLE, UNUSED_HERE, Variable, When
from weftplan.errors import ConfigError, ConfigWarning, MXNetError

THREAD_COUNTS = sorted(variable.name for variable in TABLE if variable.name.endswith("_NTHREADS"))
INTS = sorted(variable.name for variable in TABLE if variable.kind is int)
FLOATS = sorted(variable.name for variable in TABLE if variable.kind is float)
BOOLS = sorted(variable.name for variable in TABLE if variable.kind is bool)
CHOICES = sorted(variable.name for variable in TABLE if variable.choices)
BY_NAME = {variable.name: variable for variable in TABLE}

pytestmark = pytest.mark.usefixtures("clean_environment")


@functools.cache
def named_by_modules() -> set[str]:
    """Return the variables whose names occur in modules of the package, as a string or composed of parts."""
    named = set()
    for path in Path(config.__file__).parent.rglob("*.py"):
        if path.name in {"config.py", "default_settings.py"} or path.parent.name == "cli":
            continue
        for node in sources.found(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
            elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
                parts = [None, node.right.value]
            else:
                continue
            if len(parts) == 1:
                named |= BY_NAME.keys() & {parts[0]}
            elif re.search(r"[A-Z]{3}", "".join(str(part) for part in parts if part is not None)):
                pattern = "".join(".*" if part is None else re.escape(str(part)) for part in parts)
                named |= {name for name in BY_NAME if re.fullmatch(pattern, name)}
    return named


class TestTable:
    """The rows of the table."""

    @together()
    @pytest.mark.parametrize("variable", TABLE, ids=lambda variable: variable.name)
    def test_row_is_sound(self, variable: Variable, monkeypatch: pytest.MonkeyPatch):
        """A default is legal and survives conversion to text; the row has a meaning and an effect."""
        assert config.get(variable.name) == variable.default
        assert type(config.get(variable.name)) is variable.kind
        monkeypatch.setenv(variable.name, str(variable.default))
        assert config.get(variable.name) == variable.default
        assert variable.meaning.endswith(".")
        assert variable.effect
        assert variable.effective != variable.effect.startswith("no effect yet: ")
        assert (variable.kind is str) == bool(variable.choices or variable.form)

    def test_names_are_unique(self):
        """No name or alias is used twice or is also listed as unused, and each unused name has a reason."""
        names = [name for variable in TABLE for name in (variable.name, *variable.aliases)]
        assert len(names) == len(set(names))
        assert not UNUSED_HERE.keys() & set(names)
        assert all(UNUSED_HERE.values())

    def test_documented_defaults(self):
        """The defaults are those of MXNet's documentation, also if its sources differ."""
        expected = {
            "MXNET_CPU_WORKER_NTHREADS": 1,
            "MXNET_CPU_PRIORITY_NTHREADS": 4,
            "MXNET_GPU_WORKER_NTHREADS": 2,
            "MXNET_GPU_COPY_NTHREADS": 1,
            "MXNET_EXEC_ENABLE_INPLACE": True,
            "MXNET_EXEC_MATCH_RANGE": 10,
            "MXNET_EXEC_NUM_TEMP": 1,
            "MXNET_GPU_MEM_POOL_RESERVE": 5,
            "MXNET_ENGINE_TYPE": "ThreadedEnginePerDevice",
            "MXNET_KVSTORE_REDUCTION_NTHREADS": 4,
            "MXNET_KVSTORE_BIGARRAY_BOUND": 1_000_000,
            "MXNET_ENABLE_GPU_P2P": True,
            "MXNET_BACKWARD_DO_MIRROR": False,
            "MXNET_CUDNN_AUTOTUNE_DEFAULT": 0,
            "FLAGS_allocator_strategy": "mxnet",
        }
        assert {name: config.get(name) for name in expected} == expected

    def test_pool_variables_exist_for_each_device(self):
        """MXNet's five pool variables exist for three kinds of memory, the page size in two spellings."""
        for device in ("GPU", "CPU", "CPU_PINNED"):
            for remaining in ("POOL_TYPE", "POOL_RESERVE", "POOL_PAGE_SIZE", "LARGE_ALLOC_ROUND_SIZE"):
                assert config.lookup(f"MXNET_{device}_MEM_{remaining}").variable.when is When.PROCESS
            assert config.get(f"MXNET_{device}_MEM_POOL_ROUND_LINEAR_CUTOFF") == 24
            short, long = f"MXNET_{device}_POOL_PAGE_SIZE", f"MXNET_{device}_MEM_POOL_PAGE_SIZE"
            assert config.lookup(short).variable is config.lookup(long).variable

    @together()
    @pytest.mark.parametrize("variable", TABLE, ids=lambda variable: variable.name)
    def test_effect_is_honest(self, variable: Variable):
        """A row claims an effect exactly if a module names the variable, or if the variable gives another's default."""
        inputs = {second.default_from for second in TABLE}  # variables that give the default of others
        assert (variable.name in named_by_modules() | inputs) == variable.effective

    def test_thread_counts_shape_the_process(self):
        """Engine settings are read once in a process, plan settings at each bind."""
        assert BY_NAME["MXNET_CPU_WORKER_NTHREADS"].when is When.PROCESS
        assert BY_NAME["MXNET_EXEC_MATCH_RANGE"].when is When.BIND


class TestGet:
    """Reading a variable."""

    @together()
    @pytest.mark.parametrize("name", BOOLS)
    @pytest.mark.parametrize(
        ("text", "value"), [("true", True), ("FALSE", False), ("1", True), ("0", False), (" True ", True)]
    )
    def test_bool(self, monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: bool):
        """A boolean is true, false, 1 or 0, in any case and with spaces."""
        monkeypatch.setenv(name, text)
        assert config.get(name) is value

    @pytest.mark.parametrize("text", ["yes", "2", "on", "-1", "tru"])
    def test_bad_bool(self, monkeypatch: pytest.MonkeyPatch, text: str):
        """A text that is no boolean raises with the variable, the value and the legal values."""
        monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", text)
        with pytest.raises(ConfigError, match=f"MXNET_BACKWARD_DO_MIRROR='{text}'.*expected true, false, 1 or 0"):
            config.get("MXNET_BACKWARD_DO_MIRROR")

    @pytest.mark.parametrize(
        ("text", "value"), [("1e6", 1_000_000), ("1E6", 1_000_000), ("2.5e+3", 2500), ("+1e0", 1), ("1.0e1", 10)]
    )
    def test_integers_with_exponents(self, monkeypatch: pytest.MonkeyPatch, text: str, value: int):
        """Integers may have an exponent, as in MXNet's documents: 1e6 is the int 1000000."""
        monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", text)
        got = config.get("MXNET_KVSTORE_BIGARRAY_BOUND")
        assert (got, type(got)) == (value, int)

    @together()
    @pytest.mark.parametrize("name", THREAD_COUNTS)
    @pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1e-3", "1_000", "1025", "0x2", "٣"])
    def test_bad_thread_count(self, monkeypatch: pytest.MonkeyPatch, name: str, text: str):
        """A thread count that is 0, negative, too large or no decimal integer raises with range and default."""
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError) as caught:
            config.get(name)
        message = str(caught.value)
        assert f"{name}={text!r} is not legal" in message
        assert f"expected an integer from 1 to 1024 (default {BY_NAME[name].default})" in message

    @together()
    @pytest.mark.parametrize("name", INTS)
    def test_int_limits(self, monkeypatch: pytest.MonkeyPatch, name: str):
        """The limits of a range are legal; the integers just outside raise."""
        variable = BY_NAME[name]
        for limit, step in ((variable.low, -1), (variable.high, 1)):
            if limit is not None:
                monkeypatch.setenv(name, str(limit))
                assert config.get(name) == limit
                monkeypatch.setenv(name, str(int(limit) + step))
                with pytest.raises(ConfigError, match=name):
                    config.get(name)

    @together()
    @pytest.mark.parametrize("name", FLOATS)
    @pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "half", "0,5"])
    def test_bad_float(self, monkeypatch: pytest.MonkeyPatch, name: str, text: str):
        """A value that is no finite number raises."""
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"{name}='{text}' is not legal: expected a number"):
            config.get(name)

    @pytest.mark.parametrize("name", ["FLAGS_fraction_of_gpu_memory_to_use", "FLAGS_memory_fraction_of_eager_deletion"])
    @pytest.mark.parametrize("text", ["-0.1", "1.01"])
    def test_fraction_out_of_range(self, monkeypatch: pytest.MonkeyPatch, name: str, text: str):
        """A fraction outside 0 to 1 raises."""
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match="expected a number from 0 to 1 "):
            config.get(name)

    @pytest.mark.parametrize("name", CHOICES)
    def test_bad_choice(self, monkeypatch: pytest.MonkeyPatch, name: str):
        """A word that is no choice raises with all legal words."""
        monkeypatch.setenv(name, "nonsense")
        with pytest.raises(ConfigError) as caught:
            config.get(name)
        assert f"{name}='nonsense'" in str(caught.value)
        for choice in BY_NAME[name].choices:
            assert choice in str(caught.value)

    def test_unknown_engine_type(self, monkeypatch: pytest.MonkeyPatch):
        """A misspelt engine raises with the nearest name, whatever the case of its letters."""
        monkeypatch.setenv("MXNET_ENGINE_TYPE", "threadedengine")
        with pytest.raises(ConfigError, match=r"MXNET_ENGINE_TYPE='threadedengine'.*did you mean ThreadedEngine\?"):
            config.get("MXNET_ENGINE_TYPE")

    def test_page_size_is_a_power_of_two(self, monkeypatch: pytest.MonkeyPatch):
        """A page size that is no power of two raises; the error names the alias that was set."""
        monkeypatch.setenv("MXNET_GPU_POOL_PAGE_SIZE", "4095")
        with pytest.raises(ConfigError, match=r"MXNET_GPU_POOL_PAGE_SIZE='4095'.*a power of two from 32"):
            config.get("MXNET_GPU_MEM_POOL_PAGE_SIZE")

    def test_empty_is_unset(self, monkeypatch: pytest.MonkeyPatch):
        """An empty or blank value means the default."""
        for text in ("", "   "):
            monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", text)
            assert config.lookup("MXNET_EXEC_MATCH_RANGE").origin == "default"

    def test_read_at_each_call(self, monkeypatch: pytest.MonkeyPatch):
        """A bind-time variable is read from the environment at each call."""
        for text in ("1", "16", "0"):
            monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", text)
            assert config.get("MXNET_EXEC_MATCH_RANGE") == int(text)

    def test_unknown_name(self):
        """Reading an unknown variable raises with the nearest name."""
        with pytest.raises(
            ConfigError, match=r"no variable is named 'MXNET_ENGINE_TYP': did you mean MXNET_ENGINE_TYPE\?"
        ):
            config.get("MXNET_ENGINE_TYP")

    def test_error_classes(self):
        """ConfigError is an MXNetError and a ValueError."""
        assert issubclass(ConfigError, MXNetError)
        assert issubclass(ConfigError, ValueError)

    @given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=12))
    def test_any_text_is_legal_or_an_error(self, text: str):
        """Any text gives a value in the legal range or a ConfigError that names the variable."""
        for name in ("MXNET_CPU_WORKER_NTHREADS", "FLAGS_fraction_of_gpu_memory_to_use", "MXNET_ENGINE_TYPE"):
            os.environ[name] = text
            try:
                value, told = config.get(name), name
            except ConfigError as error:
                value, told = BY_NAME[name].default, str(error)
            finally:
                del os.environ[name]
            variable = BY_NAME[name]
            assert name in told
            assert value in variable.choices or variable.low <= value <= variable.high


class TestAliases:
    """Variables with several names."""

    @pytest.mark.parametrize(
        ("alias", "name", "text", "value"),
        [
            ("NNVM_EXEC_MATCH_RANGE", "MXNET_EXEC_MATCH_RANGE", "16", 16),
            ("NNVM_EXEC_NUM_TEMP", "MXNET_EXEC_NUM_TEMP", "4", 4),
            ("FLAGS_enable_inplace", "MXNET_EXEC_ENABLE_INPLACE", "false", False),
            ("enable_inplace", "MXNET_EXEC_ENABLE_INPLACE", "0", False),
        ],
    )
    def test_alias(self, monkeypatch: pytest.MonkeyPatch, alias: str, name: str, text: str, value: object):
        """An alias sets the variable and can be used to read it; the origin names the alias."""
        monkeypatch.setenv(alias, text)
        assert config.get(name) == config.get(alias) == value
        assert config.lookup(name).origin == f"alias {alias}"

    def test_name_wins_over_alias(self, monkeypatch: pytest.MonkeyPatch):
        """If name and alias are set and differ, the name's value is used and the check warns."""
        monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", "16")
        monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", "2")
        assert config.get("MXNET_EXEC_MATCH_RANGE") == 2
        with pytest.warns(ConfigWarning, match="contradict each other.*MXNET_EXEC_MATCH_RANGE wins"):
            config.check_environment()

    def test_a_warning_names_the_line_of_the_import(self, tmp_path: Path):
        """A warning at import has the line of the importing script."""
        script = tmp_path / "script.py"
        script.write_text("\nimport weftplan.config\n")
        environment = {**os.environ, "MXNET_ENGIN_TYPE": "NaiveEngine"}
        ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
        assert f"{script}:2: ConfigWarning: unknown environment variable MXNET_ENGIN_TYPE" in ended.stderr

    def test_default_from_another(self, monkeypatch: pytest.MonkeyPatch):
        """A variable may take its default from another variable, until it is set itself."""
        monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", "7")
        assert config.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD") == 7
        origin = config.lookup("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD").origin
        assert origin == "default (as MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN)"
        monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD", "3")
        assert config.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_FWD") == 3
        assert config.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD") == 7


class TestProcess:
    """Variables that are fixed after their first use."""

    def test_late_change_warns_once_per_value(self, monkeypatch: pytest.MonkeyPatch):
        """A change after the first reading has no effect and warns once per new text."""
        assert config.process("MXNET_CPU_WORKER_NTHREADS") == 1
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "4")
        with pytest.warns(
            ConfigWarning, match=r"MXNET_CPU_WORKER_NTHREADS changed from unset to '4' too late.* 1 stays"
        ):
            assert config.process("MXNET_CPU_WORKER_NTHREADS") == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert config.process("MXNET_CPU_WORKER_NTHREADS") == 1
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "nonsense")
        with pytest.warns(ConfigWarning, match="to 'nonsense' too late"):
            assert config.process("MXNET_CPU_WORKER_NTHREADS") == 1

    def test_unchanged_value_is_silent(self, monkeypatch: pytest.MonkeyPatch):
        """Repeated readings of an unchanged variable give no warning."""
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "2")
        for _ in range(3):
            assert config.process("MXNET_CPU_WORKER_NTHREADS") == 2

    def test_bad_value_is_not_remembered(self, monkeypatch: pytest.MonkeyPatch):
        """After an error the variable can be corrected and read."""
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "0")
        with pytest.raises(ConfigError, match="MXNET_CPU_WORKER_NTHREADS='0'"):
            config.process("MXNET_CPU_WORKER_NTHREADS")
        monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "3")
        assert config.process("MXNET_CPU_WORKER_NTHREADS") == 3

    def test_alias_counts_as_the_variable(self, monkeypatch: pytest.MonkeyPatch):
        """Name and alias share one value: a later change by either name has no effect and warns."""
        assert config.process("MXNET_GPU_POOL_PAGE_SIZE") == 4096
        monkeypatch.setenv("MXNET_GPU_MEM_POOL_PAGE_SIZE", "8192")
        with pytest.warns(ConfigWarning, match="MXNET_GPU_MEM_POOL_PAGE_SIZE changed"):
            assert config.process("MXNET_GPU_POOL_PAGE_SIZE") == 4096

    def test_concurrent_first_readers_agree(self):
        """Threads that concurrently read a variable for the first time get the same value."""
        barrier, seen = threading.Barrier(8), []

        def ask() -> None:
            barrier.wait()
            seen.append(config.process("MXNET_ENGINE_TYPE"))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == ["ThreadedEnginePerDevice"] * 8


def test_cache_follows_the_environment(monkeypatch):
    """A cached value is used while the environment is unchanged; each way of changing it takes effect."""
    name, alias = "MXNET_EXEC_MATCH_RANGE", "NNVM_EXEC_MATCH_RANGE"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(alias, raising=False)
    kept = config.lookup(name)
    assert config.lookup(name) is kept
    before = config.in_force()
    assert config.in_force() is before
    monkeypatch.setenv(alias, "3")
    assert (config.get(name), config.lookup(name).origin) == (3, f"alias {alias}")
    assert (alias, "3") in config.in_force()
    monkeypatch.setenv(name, "4")
    assert (config.get(name), config.lookup(name).origin) == (4, "environment")
    monkeypatch.setenv(name, "many")
    for _ in range(2):  # an illegal value is not cached, either
        with pytest.raises(ConfigError, match="many"):
            config.get(name)
    monkeypatch.delenv(name)
    os.environ.pop(alias)
    assert config.get(name) == kept.value
    assert config.in_force() == before
    monkeypatch.setattr(os, "environ", {name: "5"})
    assert config.get(name) == 5
    os.environ[name] = "6"
    assert config.get(name) == 6
    assert config.in_force() == ((name, "6"),)
