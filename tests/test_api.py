"""The public interface: what can be compiled, and the functions beside `compile`."""

import copy
import functools
import gc
import inspect
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import kiln
from kiln.base import records
from kiln.base.options import UnknownOption
from tests.support import Counting


def double_sin(x):
    """Twice the sine."""
    return torch.sin(x) * 2


@kiln.compile(backend="eager")
def decorated_at_module_level(x):
    return x.cos() + 1


class Holder:
    """Has a compiled function among its state."""

    def __init__(self):
        self.call = decorated_at_module_level


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 1.0

    def forward(self, x):
        return torch.relu(self.norm(self.inner(x))) * self.scale


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4)


@pytest.fixture(autouse=True)
def fresh():
    yield
    kiln.set_stance("default")
    kiln.uninstall()
    kiln.reset()


def captured_once(function, *args, expect):
    """One graph, no break, eager's result, and nothing captured again at the second call."""
    with records.collect() as seen:
        first, second = function(*args), function(*args)
    torch.testing.assert_close(first, expect)
    torch.testing.assert_close(second, expect)
    assert (len(seen.graphs), len(seen.breaks), len(seen.fallbacks)) == (1, 0, 0)


# What can be compiled


@pytest.mark.smoke
def test_function(x):
    compiled = kiln.compile(double_sin, backend="eager")
    captured_once(compiled, x, expect=double_sin(x))
    assert (compiled.__name__, compiled.__doc__) == ("double_sin", "Twice the sine.")
    assert compiled.__wrapped__ is double_sin
    assert inspect.signature(compiled) == inspect.signature(double_sin)


def test_lambda(x):
    captured_once(kiln.compile(lambda a, b=2.0: a * b, backend="eager"), x, expect=x * 2)


def test_decorators_with_and_without_arguments(x):
    @kiln.compile
    def plain(a):
        return a + 1

    @kiln.compile(fullgraph=True, backend="eager")
    def with_arguments(a):
        return a - 1

    captured_once(plain, x, expect=x + 1)
    captured_once(with_arguments, x, expect=x - 1)


def test_method_staticmethod_and_classmethod_in_a_class_body(x):
    class Thing:
        factor = 3

        def __init__(self, k):
            self.k = k

        @kiln.compile(backend="eager")
        def method(self, a):
            return a * self.k

        @kiln.compile(backend="eager")
        @staticmethod
        def static(a):
            return a + 10

        @staticmethod
        @kiln.compile(backend="eager")
        def static_outside(a):
            return a + 11

        @kiln.compile(backend="eager")
        @classmethod
        def of_class(cls, a):
            return a * cls.factor

    captured_once(Thing(2).method, x, expect=x * 2)
    captured_once(Thing.static, x, expect=x + 10)
    captured_once(Thing(1).static_outside, x, expect=x + 11)
    captured_once(Thing.of_class, x, expect=x * 3)


def test_bound_method(x):
    class Thing:
        def __init__(self, k):
            self.k = k

        def scale(self, a):
            return a * self.k

    captured_once(kiln.compile(Thing(5).scale, backend="eager"), x, expect=x * 5)


def test_object_with_call(x):
    class Scale:
        def __init__(self, k):
            self.k = k

        def __call__(self, a):
            return a * self.k

    captured_once(kiln.compile(Scale(4), backend="eager"), x, expect=x * 4)


def test_class_compiles_the_calls_of_its_instances(x):
    @kiln.compile(backend="eager")
    class Scale:
        def __init__(self, k):
            self.k = k

        def __call__(self, a):
            return a * self.k

    captured_once(Scale(4), x, expect=x * 4)


def test_partial(x):
    captured_once(kiln.compile(functools.partial(torch.add, alpha=2), backend="eager"), x, x, expect=x * 3)


def test_native_function(x):
    captured_once(kiln.compile(torch.sin, backend="eager"), x, expect=x.sin())


@pytest.mark.smoke
def test_wrong_arguments_raise_what_eager_raises(x):
    with pytest.raises(TypeError, match=r"double_sin\(\) takes 1 positional argument but 2 were given"):
        kiln.compile(double_sin, backend="eager")(x, x)


def test_compiled_again_is_compiled_once(x):
    twice = kiln.compile(kiln.compile(double_sin, backend="eager"), backend="eager")
    captured_once(twice, x, expect=double_sin(x))
    net = Net()
    assert kiln.compile(kiln.compile(net))._orig_mod is net


def test_not_a_callable():
    with pytest.raises(TypeError, match="callable or a module, got 3"):
        kiln.compile(3)


def test_disable_argument_gives_the_function_back(x):
    assert kiln.compile(double_sin, disable=True) is double_sin
    assert kiln.compile(disable=True)(double_sin) is double_sin


def test_compiled_function_is_copied_and_pickled_as_functions_are():
    assert copy.deepcopy(decorated_at_module_level) is decorated_at_module_level
    assert copy.copy(decorated_at_module_level) is decorated_at_module_level
    assert pickle.loads(pickle.dumps(Holder())).call is decorated_at_module_level


# Modules


@pytest.mark.smoke
def test_module(x):
    net = Net().eval()
    captured_once(kiln.compile(net, backend="eager"), x, expect=net(x))


def test_module_keeps_class_and_state_dict_keys():
    net = Net()
    compiled = kiln.compile(net, backend="eager")
    assert isinstance(compiled, Net) and compiled.__class__ is Net
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert repr(compiled) == repr(net)
    assert [p is q for p, q in zip(compiled.parameters(), net.parameters())] == [True] * 4
    compiled.load_state_dict({k: torch.ones_like(v) for k, v in net.state_dict().items()})
    assert bool((net.inner.weight == 1).all())


def test_module_and_its_original_share_attributes():
    net = Net()
    compiled = kiln.compile(net, backend="eager")
    compiled.scale = 7.0
    compiled.extra = nn.Linear(2, 2)
    net.late = "late"
    assert (net.scale, compiled.late, net.extra) == (7.0, "late", compiled.extra)
    del compiled.extra
    assert not hasattr(net, "extra") and not hasattr(compiled, "extra")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        compiled.missing


def test_changed_attribute_is_seen_by_compiled_code(x):
    net = Net().eval()
    compiled = kiln.compile(net, backend="eager")
    compiled(x)
    compiled.scale = 3.0
    torch.testing.assert_close(compiled(x), net(x))
    net.scale = 4.0
    torch.testing.assert_close(compiled(x), net(x))


def test_module_train_eval_to(x):
    net = Net()
    compiled = kiln.compile(net, backend="eager")
    assert compiled.eval() is compiled and not net.training and not net.norm.training
    torch.testing.assert_close(compiled(x), net(x))
    assert compiled.train().training and net.inner.training
    assert compiled.to(torch.float64) is compiled and net.inner.weight.dtype == torch.float64
    compiled.eval()
    torch.testing.assert_close(compiled(x.double()), net(x.double()))


def test_module_hooks_run(x):
    net = Net().eval()
    compiled = kiln.compile(net, backend="eager")
    handle = compiled.register_forward_hook(lambda module, args, out: out + 100)
    torch.testing.assert_close(compiled(x), net(x))
    assert compiled(x).min() >= 100
    handle.remove()
    assert compiled(x).min() < 100


@pytest.mark.smoke
def test_module_trains_like_eager(x):
    net = Net()
    other = copy.deepcopy(net)
    kiln.compile(net, backend="eager")(x).sum().backward()
    other(x).sum().backward()
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_module_deepcopy(x):
    net = Net().eval()
    compiled = kiln.compile(net, backend="eager")
    twin = copy.deepcopy(compiled)
    assert isinstance(twin, Net) and twin._orig_mod is not net
    assert twin.inner.weight is not net.inner.weight
    captured_once(twin, x, expect=net(x))
    assert copy.copy(compiled).inner is net.inner


def test_module_pickle(x):
    net = Net().eval()
    compiled = kiln.compile(net, backend="eager", fullgraph=True)
    again = pickle.loads(pickle.dumps(compiled))
    assert isinstance(again, Net)
    captured_once(again, x, expect=net(x))
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), net(x))


def test_module_in_a_module(x):
    inner = kiln.compile(Net().eval(), backend="eager")
    outer = nn.Sequential(inner, nn.Tanh())
    assert list(outer.state_dict())[0] == "0.inner.weight"
    torch.testing.assert_close(outer(x), torch.tanh(inner._orig_mod(x)))
    captured_once(kiln.compile(outer, backend="eager"), x, expect=outer(x))


def test_module_whose_class_registers_subclasses():
    class Base(nn.Module):
        known = []

        def __init_subclass__(cls, *, label, **kwargs):
            Base.known.append((label, cls))

    class Leaf(Base, label="leaf"):
        def forward(self, x):
            return x + 1

    assert kiln.compile(Leaf(), backend="eager")(torch.ones(1)).item() == 2
    assert Base.known == [("leaf", Leaf)]


def test_parametrization_after_compile(x):
    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    layer = nn.Linear(4, 4)
    compiled = kiln.compile(layer, backend="eager")
    compiled(x)
    before = layer.weight.detach().clone()
    nn.utils.parametrize.register_parametrization(compiled, "weight", Twice())
    torch.testing.assert_close(compiled.weight, before * 2)
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(compiled(x), x @ (before * 2).T + layer.bias)


def test_compiled_module_and_function_are_freed(x):
    net = Net()
    compiled, function = kiln.compile(net, backend="eager"), kiln.compile(lambda a: a + 1, backend="eager")
    compiled(x), function(x)
    alive = weakref.ref(net), weakref.ref(function)
    del net, compiled, function
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_graph_module(x):
    class Body(nn.Module):
        def forward(self, a):
            return a.sin() + 1

    captured_once(kiln.compile(torch.fx.symbolic_trace(Body()), backend="eager"), x, expect=x.sin() + 1)


def test_script_module_is_left_alone():
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert kiln.compile(scripted) is scripted


# Arguments, backends, options


def test_unknown_argument_lists_what_exists():
    with pytest.raises(UnknownOption, match=r"argument of compile 'fulgraph': did you mean 'fullgraph'\?"):
        kiln.compile(double_sin, fulgraph=True)
    with pytest.raises(TypeError, match="known are backend, disable, dynamic, fullgraph, mode"):
        kiln.compile(double_sin, zzz=1)


def test_unknown_backend_mode_option_and_stance_list_what_exists():
    with pytest.raises(UnknownOption, match=r"unknown backend 'eagre': did you mean 'eager'\?.*kiln"):
        kiln.compile(double_sin, backend="eagre")
    with pytest.raises(TypeError, match="backend is a name or a callable, got 3"):
        kiln.compile(double_sin, backend=3)
    with pytest.raises(UnknownOption, match="unknown mode 'fast': .*max-autotune"):
        kiln.compile(double_sin, mode="fast")
    with pytest.raises(UnknownOption, match="unknown option of backend 'eager': 'cache_limt'.*'cache_limit'"):
        kiln.compile(double_sin, backend="eager", options={"cache_limt": 3})
    with pytest.raises(UnknownOption, match="unknown stance 'eager': .*force_eager"):
        kiln.set_stance("eager")
    with pytest.raises(ValueError, match="a mode or options, not both"):
        kiln.compile(double_sin, mode="max-autotune", options={"cache_limit": 3})
    with pytest.raises(TypeError, match="'cache_limit' is of type int, got '3'"):
        kiln.compile(double_sin, options={"cache_limit": "3"})


def test_names_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        kiln.compil
    for name in dir(kiln):
        assert getattr(kiln, name) is not None


@pytest.mark.smoke
def test_backend_as_callable_sees_graph_and_inputs(x):
    seen = []

    def backend(graph, inputs):
        seen.append((graph, inputs))
        return graph.forward

    torch.testing.assert_close(kiln.compile(double_sin, backend=backend)(x), double_sin(x))
    ((graph, inputs),) = seen
    assert isinstance(graph, torch.fx.GraphModule)
    assert [tuple(t.shape) for t in inputs] == [(3, 4)]
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "call_function", "call_function", "output"]


def test_backend_gets_mode_and_options(x):
    seen = {}

    def backend(graph, inputs, **given):
        seen.update(given)
        return graph.forward

    kiln.compile(double_sin, backend=backend, mode="max-autotune")(x)
    kiln.compile(double_sin, backend=backend, options={"anything": 1})(x)
    assert seen == {"mode": "max-autotune", "options": {"anything": 1}}


def test_registered_backend_by_name(x):
    calls = []

    @kiln.register_backend(name="counting")
    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    assert {"counting", "eager", "kiln"} <= set(kiln.list_backends())
    assert kiln.lookup_backend("counting") is backend
    kiln.compile(double_sin, backend="counting")(x)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="'eager' is Kiln's own"):
        kiln.register_backend(backend, name="eager")


def test_backends_of_installed_packages(tmp_path, monkeypatch, x):
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kiln.backends]\nfrom_kiln_group=other_backend:run\n[torch_dynamo_backends]\nfrom_torch_group=other_backend:run\n"
    )
    (tmp_path / "other_backend.py").write_text("def run(graph, inputs):\n    return graph.forward\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"from_kiln_group", "from_torch_group"} <= set(kiln.list_backends())
    for name in ("from_kiln_group", "from_torch_group"):
        torch.testing.assert_close(kiln.compile(double_sin, backend=name)(x), double_sin(x))


def test_eager_backend_runs_without_module_attribute_lookup(x):
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    run = kiln.lookup_backend("eager")(graph, [x])
    assert not isinstance(run.__self__, nn.Module)
    torch.testing.assert_close(run(x), graph(x))


# Functions beside compile


def test_disable_breaks_the_graph_and_runs_in_python(x):
    @kiln.disable
    def outside(a):
        assert not kiln.is_compiling()
        return a + 1

    def f(a):
        return outside(a * 2) * 3

    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(f, backend="eager")(x), (x * 2 + 1) * 3)
    assert len(seen.breaks) == 1 and len(seen.graphs) == 2


def test_disable_keeps_what_it_calls_out_unless_told(x):
    def inner(a):
        return a.sin() + 1

    def middle(a):
        return inner(a)

    for recursive, graphs in ((True, 2), (False, 3)):
        apart = kiln.disable(middle, recursive=recursive)

        def f(a):
            return apart(a * 2) * 3

        with records.collect() as seen:
            torch.testing.assert_close(kiln.compile(f, backend="eager")(x), inner(x * 2) * 3)
        assert len(seen.graphs) == graphs


def test_disabled_module(x):
    net = kiln.disable(Net().eval())
    assert isinstance(net, Net)
    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(lambda a: net(a) + 1, backend="eager")(x), net(x) + 1)
    assert len(seen.breaks) == 1


@pytest.mark.smoke
def test_graph_break_with_its_message(x):
    def f(a):
        a = a + 1
        kiln.graph_break("told to")
        return a * 2

    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(f, backend="eager")(x), f(x))
    (broken,) = seen.breaks
    assert "told to" in broken.why and len(seen.graphs) == 2
    with pytest.raises(kiln.Break, match="told to"):
        kiln.compile(f, backend="eager", fullgraph=True)(x)


def test_allow_in_graph_gives_one_node(x):
    @kiln.allow_in_graph
    def opaque(a):
        return a.sin().cos()

    result = kiln.capture(lambda a: opaque(a) + 1, x)
    assert opaque in [n.target for n in result.graph_module.graph.nodes]


def test_disallow_in_graph_breaks(x):
    def apart(a):
        return a.sin()

    kiln.disallow_in_graph(apart)
    with records.collect() as seen:
        torch.testing.assert_close(kiln.compile(lambda a: apart(a) + 1, backend="eager")(x), x.sin() + 1)
    assert len(seen.breaks) == 1
    kiln.allow_in_graph(apart)
    assert len(kiln.capture(lambda a: apart(a) + 1, x).graph_module.graph.nodes) == 4


def test_assume_constant_result(x):
    calls = []

    @kiln.assume_constant_result
    def factor():
        calls.append(1)
        return 3

    compiled = kiln.compile(lambda a: a * factor(), backend="eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x * 3)
    assert len(calls) == 1


def test_is_compiling(x):
    assert not kiln.is_compiling()

    def f(a):
        return a + 1 if kiln.is_compiling() and torch.compiler.is_compiling() else a - 1

    torch.testing.assert_close(kiln.compile(f, backend="eager")(x), x + 1)
    assert not torch.compiler.is_compiling()


def test_mark_dynamic_and_static_are_accepted(x):
    kiln.mark_dynamic(x, 0, min=2, max=10)
    kiln.mark_static(x, [1])
    kiln.mark_static(x)
    with pytest.raises(IndexError, match="dimension 5 of a tensor with 2 dimensions"):
        kiln.mark_dynamic(x, 5)
    torch.testing.assert_close(kiln.compile(double_sin, backend="eager")(x), double_sin(x))


def test_reset_captures_anew(x):
    compiled = kiln.compile(double_sin, backend="eager")
    with records.collect() as seen:
        compiled(x), compiled(x)
        kiln.reset()
        compiled(x)
    assert len(seen.graphs) == 2


def test_capture_gives_graph_guards_and_result(x):
    result = kiln.capture(double_sin, x)
    assert isinstance(result.graph_module, torch.fx.GraphModule) and result.guards
    torch.testing.assert_close(result.result, double_sin(x))
    (out,) = result.graph_module(*result.example_inputs)
    torch.testing.assert_close(out, double_sin(x))
    assert "Guards" in str(result)


def test_capture_raises_at_a_break_and_without_operations(x):
    with pytest.raises(kiln.Break):
        kiln.capture(lambda a: a if a.sum() > 0 else -a, x)
    with pytest.raises(kiln.KilnError, match="0 graphs captured where one is needed"):
        kiln.capture(lambda a: a, x)


# Stances and config


def test_force_eager_runs_python_even_where_captured(x):
    calls = []

    def f(a):
        calls.append(1) if not torch.compiler.is_compiling() else None
        return a + 1

    compiled = kiln.compile(f, backend="eager")
    compiled(x)
    count = len(calls)
    with kiln.set_stance("force_eager"):
        compiled(x)
        made_inside = kiln.compile(f, backend="eager")
        made_inside(x)
    assert len(calls) == count + 2
    compiled(x)
    assert len(calls) == count + 2


def test_stances_on_recompile(x):
    compiled = kiln.compile(double_sin, backend="eager")
    compiled(x)
    with records.collect() as seen, kiln.set_stance("eager_on_recompile"):
        torch.testing.assert_close(compiled(x.double()), double_sin(x.double()))
        compiled(x)
    assert not seen.graphs
    with kiln.set_stance("fail_on_recompile"):
        compiled(x)
        with pytest.raises(kiln.RecompileError, match="float32.*float64"):
            compiled(x.double())


def test_stance_as_function_and_decorator(x):
    compiled = kiln.compile(double_sin, backend="eager")

    @kiln.set_stance("force_eager")
    def run():
        return compiled(x)

    with records.collect() as seen:
        run()
        assert not seen.graphs
        compiled(x)
        assert len(seen.graphs) == 1
    kiln.set_stance("fail_on_recompile")
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        compiled(x[:1])
    kiln.set_stance("default")
    compiled(x[:1])


def test_config_is_frozen_and_patched_for_a_block():
    assert kiln.config.cache_limit == 64
    with pytest.raises(AttributeError, match=r"frozen; write `with kiln.config.patch\(cache_limit=1\):`"):
        kiln.config.cache_limit = 1
    with kiln.config.patch(cache_limit=2) as inside:
        assert (kiln.config.cache_limit, inside.cache_limit) == (2, 2)
        with kiln.config.patch(strict=True):
            assert (kiln.config.cache_limit, kiln.config.strict) == (2, True)
    assert kiln.config.cache_limit == 64
    with pytest.raises(UnknownOption, match=r"unknown option 'cache_limits': did you mean 'cache_limit'\?"):
        with kiln.config.patch(cache_limits=2):
            pass
    with pytest.raises(AttributeError, match="unknown option 'nothing': known are arena_bytes"):
        kiln.config.nothing


# install


def test_install_redirects_torch_compile_and_is_undone(x):
    before = torch.compile, torch.compiler.disable
    with kiln.install(), records.collect() as seen:
        torch.testing.assert_close(torch.compile(double_sin, mode="max-autotune", name="f")(x), double_sin(x))
        torch.testing.assert_close(torch.compile(backend="inductor")(double_sin)(x), double_sin(x))
        net = Net().eval()
        net.compile()
        net(x)
        assert isinstance(torch.compiler.disable(net), Net)
    assert len(seen.graphs) == 3
    assert (torch.compile, torch.compiler.disable) == before
    kiln.install()
    kiln.install()
    kiln.uninstall()
    kiln.uninstall()
    assert (torch.compile, torch.compiler.disable) == before


# explain


def branch(a, b):
    x = (a + b) / 2.0
    if x.sum() < 0:
        return x * -1.0
    return x


@pytest.mark.smoke
def test_explain_shows_graphs_break_and_bytecode():
    told = kiln.explain(branch)(-torch.ones(3), -torch.ones(3))
    torch.testing.assert_close(told.result, torch.ones(3))
    assert (len(told.graphs), len(told.breaks)) == (2, 1)
    (broken,) = told.breaks
    assert broken.kind == "branch-on-tensor" and broken.hint
    assert broken.place.text.strip() == "if x.sum() < 0:"
    text = str(told)
    for part in (
        "2 graphs, 5 ops",
        "1 break",
        "branch#1 ",
        "[branch-on-tensor] ",
        "reason: ",
        "remedy: ",
        "if x.sum() < 0:",
        "   ^^^^^^^^^^^",
    ):
        assert part in text
    assert "return later(branch, __out" in told.bytecode() and "was " in told.beside()
    assert repr(told).startswith("<Explanation: 2 graphs")


def test_explain_a_module(x):
    told = kiln.explain(Net().eval())(x)
    assert (len(told.graphs), len(told.breaks)) == (1, 0)
    assert "Net" in str(told) and told.guards


def doubled(x):
    return x * 2


def test_compile_calls_on_a_function_of_a_module_share_what_was_captured(x):
    backend = Counting()
    for _ in range(3):
        assert kiln.compile(doubled, backend=backend)(x).equal(x * 2)
    assert len(backend.modules) == 1
    assert kiln.compile(doubled, backend=backend, fullgraph=True)(x).equal(x * 2) and len(backend.modules) == 2
    assert kiln.compile(doubled, backend=Counting())(x).equal(x * 2) and len(backend.modules) == 2
    assert kiln.explain(doubled)(x).graphs and kiln.explain(doubled)(x).graphs
    kiln.reset()
    assert kiln.compile(doubled, backend=backend)(x).equal(x * 2) and len(backend.modules) == 3


def seen_by_tracing(asked):
    def backend(graph, inputs):
        asked.append([v if isinstance(v, int) else tuple(v.shape) for v in inputs])
        return torch.jit.trace(graph, inputs) if len(inputs) == 1 else make_fx(graph)(*inputs)

    return backend


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.filterwarnings("ignore")  # what torch says of tracing
def test_a_backend_that_traces_the_graph_is_asked_for_each_size(dynamic):
    def f(x):
        return x.new_ones(x.shape[0] * 2), x * x.shape[0]

    def g(x, d):
        return torch.add(x, x, alpha=d)

    for function, calls in ((f, [(3,), (4,), (5,), (4,), (3,)]), (g, [(3, 5), (3, 6), (4, 6), (4, 7), (4, 6)])):
        asked = []
        compiled = kiln.compile(function, backend=seen_by_tracing(asked), dynamic=dynamic)
        with kiln.records() as seen:
            for size, *rest in calls:
                x = torch.arange(float(size))
                mine, eager = compiled(x, *rest), function(x, *rest)
                assert all(map(torch.equal, mine, eager)) if type(eager) is tuple else torch.equal(mine, eager)
        assert len(seen.graphs) == (1 if dynamic else 2 if function is f else 3)
        assert len(asked) == len({*calls}) or not dynamic


def test_a_backend_that_traces_the_graph_is_asked_for_so_many_sizes():
    asked = []
    compiled = kiln.compile(lambda x: x * x.shape[0], backend=seen_by_tracing(asked), dynamic=True)
    with kiln.config.patch(cache_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in range(2, 7):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), float(size)))
    assert len(asked) == 2


def test_a_backend_that_runs_no_op_is_asked_once():
    asked = []

    def backend(graph, inputs):
        asked.append(graph)
        return kiln.lookup_backend("kiln")(graph, inputs)

    compiled = kiln.compile(lambda x: x.sin() * x.shape[0], backend=backend, dynamic=True)
    for size in range(2, 5):
        assert torch.allclose(compiled(torch.ones(size)), torch.ones(size).sin() * size)
    assert len(asked) == 1
