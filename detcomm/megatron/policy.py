# SPDX-License-Identifier: Apache-2.0
"""Which of Megatron's groups reduce in a fixed order: a value, with a text form for the command line.

    dp,tp=fixed; pp,ep=stock
    CONTEXT_PARALLEL_GROUP=fixed(association=ring, ring_chunk_elems=4096)

The first rule that fits a group's description decides. What no rule fits is fixed-order. Knows nothing of torch.
"""

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import attrs

from detcomm.errors import UsageError
from detcomm.megatron.inventory import SHORT_NAMES, TRAFFIC, is_known, patterns_of, traffic_of
from detcomm.options import ENV_PREFIX, Options

VARIABLE = "DETCOMM_MEGATRON_POLICY"

FIXED: Literal["fixed"] = "fixed"
STOCK: Literal["stock"] = "stock"

Choice = Options | Literal["fixed", "stock"]
"""A group's options, ``"fixed"`` for those of the run, or ``"stock"``: NCCL on GPUs, gloo on CPUs."""


@attrs.frozen
class Rule:
    """One rule: descriptions that fit ``pattern`` are treated by ``choice``.

    Args:
        pattern: a short name of ``inventory`` (``tp``), or a description; ``*`` stands for any text.
    """

    pattern: str
    choice: Choice

    def __attrs_post_init__(self) -> None:
        for pattern in patterns_of(self.pattern):
            if not is_known(pattern):
                names = (*SHORT_NAMES, *(traffic.pattern for traffic in TRAFFIC))
                near = difflib.get_close_matches(pattern, names, 3)
                hint = f"; do you mean {' or '.join(near)}?" if near else ""
                raise UsageError(f"policy: no group of Megatron fits {self.pattern!r}{hint}")

    def fits(self, description: str) -> bool:
        return any(fnmatchcase(description, pattern) for pattern in patterns_of(self.pattern))

    @property
    def exact(self) -> bool:
        """Whether the rule names its groups, rather than taking what comes."""
        return "*" not in self.pattern

    def __str__(self) -> str:
        return f"{self.pattern}={_choice_text(self.choice)}"


@attrs.frozen
class Policy:
    """Ordered rules over group descriptions. Without rules every group is fixed-order.

    Raises:
        UsageError: a rule that no group of a known release of Megatron fits.
    """

    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, **choices: Choice) -> Self:
        """``Policy.of(dp="fixed", pp="stock")``: by short names, in this order."""
        return cls(tuple(Rule(name, choice) for name, choice in choices.items()))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The policy of a text such as ``dp,tp=fixed; pp,ep=stock``.

        Raises:
            UsageError: saying which part does not parse.
        """
        return cls(tuple(rule for part in text.split(";") if part.strip() for rule in _parse_rules(part.strip())))

    def choose(self, description: str | None) -> Choice:
        """What becomes of a group.

        Raises:
            UsageError: a group that no known release of Megatron makes would be left stock by a rule that does not
                name it.
        """
        for rule in self.rules:
            if rule.fits(description or ""):
                if rule.choice == STOCK and not rule.exact and traffic_of(description) is None:
                    raise UsageError(
                        f"policy: Megatron makes a group {description!r} of which detcomm does not know what goes "
                        f"through it, and {rule} would leave its sums in stock order: put a rule for it first"
                    )
                return rule.choice
        return FIXED

    def unused(self, descriptions: Iterable[str]) -> tuple[Rule, ...]:
        """The rules that fit none of these groups."""
        made = tuple(descriptions)
        return tuple(rule for rule in self.rules if not any(rule.fits(description) for description in made))

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules)) or "*=fixed"


def _parse_rules(part: str) -> list[Rule]:
    names, equals, choice = part.partition("=")
    patterns = [name.strip() for name in names.split(",")]
    if not equals or not all(patterns):
        raise UsageError(f"policy: expected GROUPS=fixed, GROUPS=stock or GROUPS=fixed(OPTION=VALUE), got {part!r}")
    return [Rule(pattern, _parse_choice(choice.strip(), part)) for pattern in patterns]


def _parse_choice(text: str, part: str) -> Choice:
    if text == STOCK:
        return STOCK
    if text == FIXED:
        return FIXED
    match = re.fullmatch(r"fixed\((.*)\)", text)
    if match is None:
        raise UsageError(f"policy: expected fixed, stock or fixed(OPTION=VALUE, …) in {part!r}, got {text!r}")
    return _parse_options(match[1], part)


def _parse_options(text: str, part: str) -> Options:
    names = [field.name for field in attrs.fields(Options)]
    values: dict[str, str] = {}
    # A comma inside parentheses belongs to a schedule: staged(8,32).
    for item in re.split(r",(?![^(]*\))", text):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or name not in names:
            raise UsageError(f"policy: expected OPTION=VALUE with one of {', '.join(names)} in {part!r}, got {item!r}")
        values[ENV_PREFIX + name.upper()] = value
    return Options.from_environment(values)


def _choice_text(choice: Choice) -> str:
    if isinstance(choice, str):
        return choice
    defaults = Options()
    changed: list[tuple[str, Any]] = [
        (field.name, getattr(choice, field.name))
        for field in attrs.fields(Options)
        if getattr(choice, field.name) != getattr(defaults, field.name)
    ]
    given = ", ".join(f"{name}={_value_text(value)}" for name, value in changed)
    return f"fixed({given or f'association={choice.association}'})"


def _value_text(value: Any) -> str:
    return str(value.total_seconds()) if hasattr(value, "total_seconds") else str(value)
