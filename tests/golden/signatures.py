"""Write ``data/signatures.txt``, the public signatures of MXNet 1.9.1; run by a Python that has MXNet.

Each line is a path and its parameters: ``name`` is required, ``name=`` has a default, ``*`` precedes parameters that
are accepted by keyword only. A class has a line for its constructor, which begins with the paths of its bases, and a
line for each method whose parameters differ from those of its bases. Parameters that a constructor passes on to its
bases, and those that MXNet only documents under ``**kwargs``, count as parameters by keyword.
"""

import inspect
import pathlib
import re

MODULES = """
    attribute base callback context executor executor_manager image initializer io kvstore log lr_scheduler metric model
    module monitor name operator optimizer profiler random recordio rnn runtime test_utils util visualization
    nd nd.contrib nd.image nd.linalg nd.random nd.sparse sym sym.contrib sym.image sym.linalg sym.random
    sym.sparse contrib.io contrib.svrg_optimization contrib.text.embedding contrib.text.utils contrib.text.vocab
    gluon.utils notebook.callback
"""
DOCUMENTED = re.compile(r"^(\w+) : (.*)", re.MULTILINE)


def documented(function):
    """Return the parameters that a generated docstring lists, as keywords."""
    listed = inspect.getdoc(function) or ""
    listed = listed.partition("Parameters\n")[2].partition("\nReturns\n")[0]
    found = [
        (name, kind) for name, kind in DOCUMENTED.findall(listed) if name not in ("kwargs", "inputs", "data", "args")
    ]
    return [name + "=" * (not kind.endswith("required")) for name, kind in found]


def parameters(function, more=(), skip=0):
    """Return the parameters of a callable as a list of words; ``more``: further keywords, which ``**kwargs`` takes."""
    words, keywords, rest = [], [], []
    for one in list(inspect.signature(function).parameters.values())[skip:]:
        word = one.name + "=" * (one.default is not one.empty)
        if one.kind is one.VAR_POSITIONAL:
            words.append("*" + one.name)
        elif one.kind is one.VAR_KEYWORD:
            rest.append("**" + one.name)
        elif one.kind is one.KEYWORD_ONLY:
            keywords.append(word)
        else:
            words.append(word)
    if rest:
        taken = {word.strip("*=") for word in words + keywords}
        keywords += [word for word in more if word.strip("=") not in taken]
    if keywords and not any(word.startswith("*") for word in words):
        words.append("*")
    return words + keywords + rest


def passes_on(function):
    """Return whether a constructor's further keywords are those of its bases."""
    return any(one.name == "kwargs" for one in inspect.signature(function).parameters.values())


def constructor(kind):
    """Return the parameters of a class's constructor, with the keywords that it passes on to its bases."""
    own = next((base for base in kind.__mro__ if "__init__" in vars(base)), object)
    if own is object:
        return parameters(kind) if "__new__" in vars(kind) else []
    following = [base for base in own.__mro__[1:] if "__init__" in vars(base)]
    inherited = constructor(following[0]) if following and passes_on(vars(own)["__init__"]) else []
    names = [word for word in inherited if not word.startswith("*")]
    words = parameters(vars(own)["__init__"], names, skip=1)
    return ["*", "**internal"] if "handle" in words else words  # objects of the C library are made by functions


def methods(kind):
    """Return {name: parameters} of the public methods of a class, and of those that make it callable.

    Methods that pass everything on to the operator of their name have the operator's parameters.
    """
    from mxnet import nd, sym

    operators = {nd.NDArray: nd, sym.Symbol: sym}.get(kind)
    found = {}
    own = [base for base in kind.__mro__ if base.__module__.startswith("mxnet")]
    for name in sorted({name for base in own for name in vars(base)}):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(value, (staticmethod, classmethod)):
            found[name] = parameters(value.__func__, skip=int(isinstance(value, classmethod)))
        elif inspect.isfunction(value):
            words = parameters(value, skip=1)
            if operators and words == ["*args", "**kwargs"] and hasattr(operators, name):
                words = parameters(getattr(operators, name), skip=1)
            found[name] = words
    return found


def lines(mx):
    """Yield the lines of the file."""
    paths = {}  # class -> the path under which it is written
    found = []
    for module_name in MODULES.split():
        module = mx
        for part in module_name.split("."):
            module = getattr(module, part)
        home = ".".join(module.__name__.split(".")[:2])  # names imported from elsewhere are listed there
        homes = (home, home.removeprefix("mxnet."))  # generated functions name their module without the package
        for name, value in sorted(vars(module).items()):
            public = not name.startswith("_") and (getattr(value, "__module__", "") or "").startswith(homes)
            if public and inspect.isclass(value) and not issubclass(value, BaseException):
                paths.setdefault(value, f"{module_name}.{name}")
                found.append((f"{module_name}.{name}", value))
            elif public and inspect.isfunction(value):
                generic = [p.kind for p in inspect.signature(value).parameters.values()][-1:] == [
                    inspect.Parameter.VAR_KEYWORD
                ]
                words = parameters(value, documented(value) if generic else ())
                if words[:1] == ["*args"] and module_name == "io":
                    words[0] = "*"  # refused by the function itself
                yield f"{module_name}.{name} {' '.join(words)}".rstrip()
    for path, kind in found:
        if paths[kind] != path:
            continue
        bases = [paths[base] for base in kind.__mro__[1:] if base in paths]
        yield f"{path} ({','.join(bases)}) {' '.join(constructor(kind))}".rstrip()
        inherited = {}
        for base in reversed([base for base in kind.__mro__[1:] if base in paths]):
            inherited.update(methods(base))
        for name, words in methods(kind).items():
            if inherited.get(name) != words:
                yield f"{path}.{name} {' '.join(words)}".rstrip()


def main():
    """Write the file."""
    import mxnet as mx
    import mxnet.contrib.io
    import mxnet.contrib.svrg_optimization
    import mxnet.contrib.text
    import mxnet.executor_manager
    import mxnet.notebook.callback

    path = pathlib.Path(__file__).resolve().parent / "data" / "signatures.txt"
    path.write_text("".join(f"{line}\n" for line in sorted(set(lines(mx)))))
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
