"""Unknown keyword arguments raise an error that names the right keyword."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan.errors import KeywordError, MXNetError, did_you_mean
from weftplan.support.keyword_errors import Constructed, known_keywords


def network() -> Any:
    """Return a classifier of one layer."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")


def make_iterator(**settings: Any) -> Any:
    """Return an NDArrayIter with the keywords ``settings``, by default with batches of two."""
    return mx.io.NDArrayIter(np.zeros((4, 2), np.float32), np.zeros(4), **(settings or {"batch_size": 2}))


def make_module(**settings: Any) -> Any:
    """Return a Module with the keywords ``settings``."""
    return mx.mod.Module(network(), **settings)


def make_plan() -> Any:
    """Return a plan of the network."""
    return network().plan(data=(2, 4))


NEAR: dict[str, tuple[Callable[[], object], str]] = {
    "fit epochs": (lambda: make_module().fit(make_iterator(), epochs=1), "num_epoch"),
    "fit num_epochs": (lambda: make_module().fit(make_iterator(), num_epochs=1), "num_epoch"),
    "fit metric": (lambda: make_module().fit(make_iterator(), metric="acc"), "eval_metric"),
    "fit metrics": (lambda: make_module().fit(make_iterator(), metrics=["acc"]), "eval_metric"),
    "fit validation_data": (lambda: make_module().fit(make_iterator(), validation_data=make_iterator()), "eval_data"),
    "fit budget": (lambda: make_module().fit(make_iterator(), budget="1GB"), "memory_budget"),
    "fit optim": (lambda: make_module().fit(make_iterator(), optim="adam"), "optimizer"),
    "fit callbacks": (lambda: make_module().fit(make_iterator(), callbacks=[]), "batch_end_callback"),
    "score": (lambda: make_module().score(make_iterator(), metric="acc"), "eval_metric"),
    "predict": (lambda: make_module().predict(make_iterator(), num_batches=1), "num_batch"),
    "Module ctx": (lambda: make_module(ctx=mx.cpu()), "context"),
    "Module budget": (lambda: make_module(budget="1GB"), "memory_budget"),
    "Module memory": (lambda: make_module(memory="1GB"), "memory_budget"),
    "Module data_name": (lambda: make_module(data_name=["data"]), "data_names"),
    "bind": (lambda: make_module().bind([("data", (4, 4))], training=True), "for_training"),
    "init_params": (lambda: make_module().init_params(init=mx.init.Zero()), "initializer"),
    "set_params": (lambda: make_module().set_params({}, {}, allow_misssing=True), "allow_missing"),
    "init_optimizer": (lambda: make_module().init_optimizer(optim="sgd"), "optimizer"),
    "NDArrayIter": (lambda: make_iterator(batchsize=4), "batch_size"),
    "SGD lr": (lambda: mx.optimizer.SGD(lr=0.1), "learning_rate"),
    "create lr": (lambda: mx.optimizer.create("adam", lr=0.1), "learning_rate"),
    "SGD weight_decay": (lambda: mx.optimizer.SGD(weight_decay=0.1), "wd"),
    "Xavier": (lambda: mx.init.Xavier(magnitud=2), "magnitude"),
    "TopKAccuracy": (lambda: mx.metric.TopKAccuracy(topk=3), "top_k"),
    "FactorScheduler": (lambda: mx.lr_scheduler.FactorScheduler(1, factr=0.1), "factor"),
    "Speedometer": (lambda: mx.callback.Speedometer(batchsize=3), "batch_size"),
    "do_checkpoint": (lambda: mx.callback.do_checkpoint("x", perod=2), "period"),
    "LSTMCell": (lambda: mx.rnn.LSTMCell(num_hiden=3), "num_hidden"),
    "models": (lambda: mx.models.get("lenet", num_class=3), "num_classes"),
    "array": (lambda: mx.nd.array([1], type="float32"), "dtype"),
    "zeros": (lambda: mx.nd.zeros((1,), context=mx.cpu()), "ctx"),
    "PlanOptions": (lambda: mx.planner.PlanOptions(budegt=3), "budget"),  # type: ignore[call-arg]
    "plan memory": (lambda: network().plan(data=(2, 4), memory="1GB"), "budget"),
    "plan training": (lambda: network().plan(data=(2, 4), training=True), "train"),
    "simple_bind": (lambda: network().simple_bind(mx.cpu(), data=(2, 4), grad_reqs="null"), "grad_req"),
    "forward": (lambda: network().simple_bind(mx.cpu(), data=(2, 4)).forward(training=True), "is_train"),
    "batch_max": (lambda: make_plan().batch_max(memory="1GB"), "budget"),
    "to_html": (lambda: make_plan().to_html(titel="x"), "title"),
    "task": (lambda: mx.engine.task(write=["a"]), "writes"),
    "tiles": (lambda: mx.engine.tiles(np.zeros(4), tile_shape=2), "tile"),
    "engine": (lambda: mx.engine.create("ThreadedEngine", workers=2), "task_workers"),
    "profiler": (lambda: mx.profiler.set_config(file="x"), "filename"),
    "Variable": (lambda: mx.sym.Variable("x", shap=(2,)), "shape"),  # type: ignore[arg-type]
}


@together()
@pytest.mark.parametrize("case", NEAR)
def test_error_names_the_right_keyword(case: str) -> None:
    """A misspelt keyword, or another library's keyword, raises with the right keyword."""
    call, right = NEAR[case]
    with pytest.raises(MXNetError, match=f"did you mean '{right}'"):
        call()


@pytest.mark.parametrize(
    ("name", "told"),
    [("learning_rate", "optimizer_params"), ("batch_size", "NDArrayIter"), ("context", r"Module\(symbol, context=")],
)
def test_fit_redirects_foreign_keywords(name: str, told: str) -> None:
    """A keyword of the optimizer, iterator or module that is passed to ``fit`` raises with its proper place."""
    with pytest.raises(KeywordError, match=told):
        make_module().fit(make_iterator(), num_epoch=1, **{name: 1})


def test_unknown_keyword_is_a_type_error() -> None:
    """An unknown keyword raises a TypeError, and the call has no effect."""
    fitted = make_module()
    with pytest.raises(TypeError):
        fitted.fit(make_iterator(), num_epoch=1, epochs=1)
    assert not fitted.binded


def test_signatures_and_types_are_those_of_the_function() -> None:
    """Checked functions keep their signature and docstring, and their instances can be pickled."""
    assert "num_epoch" in inspect.signature(mx.mod.Module.fit).parameters
    assert list(inspect.signature(mx.init.Xavier).parameters) == ["rnd_type", "factor_type", "magnitude"]
    assert mx.mod.Module.fit.__doc__
    assert pickle.loads(pickle.dumps(mx.init.Xavier(magnitude=2))).magnitude == 2


def test_user_classes_keep_working() -> None:
    """A subclass may remove its own settings from the keywords and pass on the others."""

    class Mine(mx.optimizer.SGD):
        def __init__(self, **settings: Any) -> None:
            self.mine = settings.pop("mine")
            super().__init__(**settings)

    assert Mine(mine=3, learning_rate=0.5).mine == 3
    with pytest.raises(KeywordError, match=r"Mine has no setting 'lr': did you mean 'learning_rate'"):
        Mine(mine=3, lr=0.5)


def test_function_with_any_keyword_checks_positions_alone() -> None:
    """A function that takes any keyword is not checked for their names, only for too many positional arguments."""

    @known_keywords()
    def any_keyword(size: int = 0, **options: int) -> dict[str, int]:
        return options

    assert any_keyword(1, colour=2) == {"colour": 2}
    with pytest.raises(KeywordError, match="any_keyword takes 1 arguments by position, got 2: size"):
        any_keyword(1, 2)


def test_class_without_constructor_uses_its_base() -> None:
    """The error names the class that was called, and lists the keywords of its base's constructor."""

    class Base(Constructed):
        def __init__(self, size: int = 0) -> None:
            self.size = size

    class Derived(Base):
        pass

    assert Derived(size=3).size == 3
    with pytest.raises(KeywordError, match=r"Derived has no setting 'sizes': did you mean 'size'\? known: size$"):
        Derived(sizes=3)  # type: ignore[call-arg]


def test_names_that_other_libraries_use() -> None:
    """Another library's name for an argument is recognized only if the function has the argument."""
    assert did_you_mean("lr", ["left", "learning_rate"]) == "did you mean 'learning_rate'? "
    assert did_you_mean("lr", ["left"]) == ""
    assert did_you_mean("init", ["x", "initializer"]) == "did you mean 'initializer'? "
