"""Where chat templates run: Jinja's immutable sandbox, with bounds on time and size.

Jinja compiles a template to a function that nothing can stop from outside. So that function looks
after itself: before it is compiled, the template is rewritten to tick in every turn of a loop, in
every macro and at every call, and to pay for what it makes: a tick takes from the render's
`Budget`, which raises where the turns, the time or the room have run out. No loop and no recursion
goes on behind that. What is left unbounded is a single built-in operation on what was paid for,
such as comparing lists that hold each other many times over.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import chain
from typing import Any, TypeVar

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.template_budget import Budget, refuse_large, refuse_wide

# No names that a template could set or call.
BUDGET = "the budget"
_TICK, _PAID = "the tick", "the payment"
# The template's own text costs as much as one turn per so many characters.
_CHARS_PER_TURN = 64
# Filters whose numbers are widths or counts.
_WIDENING = frozenset({"center", "indent", "batch", "slice", "tojson", "truncate"})
T = TypeVar("T")


def environment() -> ImmutableSandboxedEnvironment:
    """The settings that transformers renders chat templates with, within bounds.

    Whatever is rendered needs a `Budget` under the name `BUDGET`. Raises jinja2.TemplateError for a
    template that uses what is left out: `lipsum` and `wordwrap`, which make text out of nothing.
    """
    bounded = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    del bounded.globals["lipsum"], bounded.filters["wordwrap"]
    for name, function in bounded.filters.items():
        bounded.filters[name] = bounded_filter(name, function)
    bounded.filters |= {_TICK: _tick, _PAID: _paid}
    return bounded


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paying for what it makes and refusing widths beyond any sense."""
    wants = getattr(function, "jinja_pass_arg", None)

    @pass_context
    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.tick()
        if name in _WIDENING:
            refuse_large(*args, *kwargs.values())
        elif name == "format":
            refuse_wide(value, (*args, *kwargs.values()))
        elif name == "replace":
            budget.replacing(str(value), *_first_two(args))
        elif name == "join":
            budget.joining(_first_two((*args, *kwargs.values()))[0], value)
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(wants.name if wants is not None else "", ())
        result = function(*first, value, *args, **kwargs)
        budget.made(result)
        return result

    return bounded


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _instrument(template)
        template.set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(__context)
        budget.tick()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_method(budget, text, __obj.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.made(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja puts a formatter of its own in the place of a string's `format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            maps = [each for each in args if isinstance(each, Mapping)]
            refuse_wide(pattern, (*args, *chain(*(each.values() for each in (*maps, kwargs)))))
            return wrapped(*args, **kwargs)

        return formatted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        if operator == "*":
            budget.product(left, right)
        elif operator == "**":
            refuse_large(left, right)
        elif operator == "%":
            refuse_wide(left, right if isinstance(right, tuple) else (right,))
        result = super().call_binop(context, operator, left, right)
        budget.made(result)
        return result


def _check_method(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a method of a string is called."""
    given = (*args, *kwargs.values())
    if name == "replace":
        budget.replacing(text, *_first_two(given))
    elif name == "join":
        budget.joining(text, _first_two(given)[0])
    elif name == "translate":
        refuse_large(float("inf"))
    else:
        refuse_large(*given)


def _first_two(args: tuple[Any, ...]) -> tuple[Any, Any]:
    first, second, *_ = *args, "", ""
    return first, second


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's part for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class says so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _instrument(template: nodes.Template) -> None:
    """Puts ticks in front of what may repeat, and payments around what is put together."""
    for loop in list(template.find_all(nodes.For)):
        if loop.test is not None:
            loop.test = nodes.And(_filtered(nodes.Const(1), _TICK), loop.test)
        loop.body.insert(0, _ticking(loop.body))
    for macro in list(template.find_all(nodes.Macro)):
        macro.body.insert(0, _ticking(macro.body))
    for block in list(template.find_all(nodes.CallBlock)):
        block.body.insert(0, _ticking(block.body))
    for parent in [template, *template.find_all(nodes.Node)]:
        for field, value in list(parent.iter_fields()):
            if isinstance(value, list):
                value[:] = [_paying(parent, each) for each in value]
            else:
                setattr(parent, field, _paying(parent, value))


def _ticking(body: list[nodes.Node]) -> nodes.ExprStmt:
    """One turn, and more where the template's own text in it is long."""
    texts = [each for node in body for each in _with_all(node, nodes.TemplateData)]
    turns = 1 + sum(len(each.data) for each in texts) // _CHARS_PER_TURN
    return nodes.ExprStmt(_filtered(nodes.Const(turns), _TICK))


def _with_all(node: nodes.Node, kind: type[nodes.TemplateData]) -> list[nodes.TemplateData]:
    return [node] if isinstance(node, kind) else list(node.find_all(kind))


def _paying(parent: nodes.Node, value: Any) -> Any:
    """What is printed is paid for: it may go into a variable. So is what `~` puts together."""
    printed = isinstance(parent, nodes.Output) and not isinstance(value, nodes.TemplateData)
    joined = isinstance(value, nodes.Concat)
    if isinstance(parent, nodes.Filter) and parent.name == _PAID:
        return value
    return _filtered(value, _PAID) if printed or joined else value


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


@pass_context
def _tick(context: Context, turns: int) -> bool:
    _budget_of(context).tick(turns)
    return True


@pass_context
def _paid(context: Context, value: T) -> T:
    _budget_of(context).made(value)
    return value


def _budget_of(context: Context) -> Budget:
    budget = context.resolve_or_missing(BUDGET)
    assert isinstance(budget, Budget)
    return budget
