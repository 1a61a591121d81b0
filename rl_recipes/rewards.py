"""What a run is rewarded with: one source or several, each with a weight, asked as one.

    tpips:preserve                                        a mode of the TPIPS metric that the flags name
    tpips:preserve=0.7,tpips:target=0.3                   several, with weights; one metric serves both
    tpips:edit[metric=released:mid,device=cuda:1,dtype=bfloat16]=0.5     with a metric of its own
    remote:http://host:8000=0.5                           a reward server (tpips-reward serve), see docs/serving.md
    my_module:my_function=0.3                             a function of yours, see `FunctionReward`

`build_rewards` makes them: TPIPS modes of one metric together, and each other source by `open_source`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from rl_recipes.config import ConfigError, RewardArguments
from rl_recipes.logs import each_process
from rl_recipes.prompts import Prompt
from tpips_reward import load_metric
from tpips_reward.errors import TPIPSError, reason
from tpips_reward.rewards import RewardOutput, TPIPSReward, parse_reward
from tpips_reward.serving.client import RemoteReward

#: What may stand in brackets behind a TPIPS reward.
TPIPS_OPTIONS = ("metric", "revision", "device", "dtype", "gate", "gate_threshold", "gate_weight")
#: Arguments that a function may have.
FUNCTION_ARGUMENTS = ("images", "sources", "instructions", "preserve", "target")
#: The longest wait before a failed reward is asked again, in seconds.
LONGEST_WAIT = 10.0
_MOST_SHOWN = 8
BUILT_IN = "tpips:preserve, tpips:target, tpips:edit and remote:http://host:port"


class WrongAnswer(TPIPSError):
    """An answer of another type than rewards have; asking again does not mend it."""


class Source(Protocol):
    """One source: (edits, sources, prompts) -> the rewards of the edits; its `scores` are not weighted."""

    def __call__(self, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput: ...


@dataclass(frozen=True)
class Entry:
    """One entry of ``--reward``: its name, the options in brackets, and the weight."""

    name: str
    options: tuple[tuple[str, str], ...] = ()
    weight: float = 1.0

    @property
    def family(self) -> str:
        """What stands before the colon."""
        return self.name.partition(":")[0].strip()

    @property
    def suffix(self) -> str:
        """The options as they are written, for names in logs."""
        return "[" + ",".join(f"{k}={v}" for k, v in self.options) + "]" if self.options else ""


def parse_entries(text: str) -> list[Entry]:
    """Parses ``name[option=value,...]=weight,...``; the weight is 1 where none is written.

    >>> parse_entries("tpips:edit[device=cuda:1]=0.5,a.b:c")[0].options
    (('device', 'cuda:1'),)

    Raises:
        ConfigError: empty entries, brackets that do not fit, weights that are no positive numbers, or an entry twice.
    """
    entries = []
    for piece in re.split(r",(?![^\[\]]*\])", text):
        match = re.fullmatch(r"\s*([^\[\]]+?)\s*(?:\[([^\[\]]*)\])?\s*(?:=\s*([^=\[\]:/]+))?", piece)
        if match is None:
            raise ConfigError(
                f"The reward {piece.strip()!r} cannot be read; write name, name=weight or name[option=value]=weight, with "
                "commas between several."
            )
        name, options, weight = match.groups()
        entries.append(Entry(name, _options(options, piece), _weight(weight, piece)))
    names = [entry.name + entry.suffix for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"The reward {name!r} stands twice in {text!r}; write it once, with the sum of its weights.")
    return entries


def _options(text: str | None, piece: str) -> tuple[tuple[str, str], ...]:
    pairs = [] if text is None else [part.partition("=") for part in text.split(",")]
    if any(not (key.strip() and sign and value.strip()) for key, sign, value in pairs):
        raise ConfigError(f"The brackets of {piece.strip()!r} must hold option=value, with commas between several.")
    return tuple((key.strip(), value.strip()) for key, _, value in pairs)


def _weight(text: str | None, piece: str) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        raise ConfigError(f"The weight {text.strip()!r} in {piece.strip()!r} is not a number.") from None  # type: ignore[union-attr]
    if not 0.0 < weight < float("inf"):
        raise ConfigError(f"The weight {weight} in {piece.strip()!r} must be positive and finite.")
    return weight


class AspectSource:
    """A reward that is told each prompt's aspects."""

    reward: TPIPSReward | RemoteReward

    def __call__(self, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput:
        return self.reward(
            edits, sources, preserve=[list(p.preserve) for p in prompts], target=[list(p.target) for p in prompts]
        )


class TPIPSSource(AspectSource):
    """Modes of one TPIPS metric, measured together."""

    reward: TPIPSReward

    def __init__(self, reward: TPIPSReward) -> None:
        self.reward = reward


class RemoteSource(AspectSource):
    """The reward of a server; it waits and asks again by itself, and gives no gradient."""

    def __init__(self, address: str, options: dict[str, str]) -> None:
        odd = options.keys() - {"reward", "timeout", "patience"}
        if odd:
            raise ConfigError(f"A reward server has no option {min(odd)!r}; there are reward, timeout and patience.")
        times = {name: _number(options[name], None) for name in ("timeout", "patience") if name in options}
        self.reward = RemoteReward(address, options.get("reward"), **times)  # type: ignore[arg-type]

    def __call__(self, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput:
        # the parts that the server's reward has are none of this run's, which gives its own weight and name to the whole
        return replace(super().__call__(edits, sources, prompts), parts={})


class FunctionReward:
    """A function of the user's, given by name on the command line and therefore trusted.

    It gets those of these arguments that it names, of equal length B: ``images`` and ``sources`` (lists of (3, H, W)
    float32 tensors in [0, 1], of one size each pair), ``instructions`` (texts), ``preserve`` and ``target`` (lists of
    aspects). It answers B numbers, higher is better: a list, an array, a tensor, whose gradient is used by
    backprop_edit, or a `RewardOutput`, of which scores, terms and aspects are used. An error or a number that is not finite stops the run
    after the retries, and an answer of another type at once; neither becomes a reward.

    Args:
        name: ``module:function``; the module is looked for in the working directory first.

    Raises:
        ConfigError: it cannot be imported, is no function, or has arguments that it would not get.
    """

    def __init__(self, name: str) -> None:
        module, _, attribute = name.partition(":")
        # First, for a script's own folder stands before it otherwise; what the module imports later finds it at the end.
        sys.path.insert(0, os.getcwd())
        try:
            function = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever the module's own code raises
            known = f" The rewards that come along are {BUILT_IN}." if isinstance(error, ModuleNotFoundError) else ""
            raise ConfigError(
                f"The reward {name!r} cannot be imported ({type(error).__name__}: {reason(error)}).{known}"
            ) from error
        finally:
            sys.path.append(sys.path.pop(0))
        if not callable(function):
            raise ConfigError(f"The reward {name!r} is a {type(function).__name__}; give a function.")
        self.name, self.function = name, function
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:  # functions in C need not say what they take
            raise ConfigError(f"The reward {name!r} does not say what arguments it has; write a function around it.") from error
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        odd = [p.name for p in parameters if p.name not in FUNCTION_ARGUMENTS and p.default is p.empty]
        odd = [n for n in odd if n in self._names]
        if odd or not ("images" in self._names or self._all):
            what = f"asks for {odd[0]!r}" if odd else "does not ask for 'images'"
            raise ConfigError(f"The reward {name!r} {what}; its arguments may be {', '.join(FUNCTION_ARGUMENTS)}.")

    def __call__(self, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput:
        # what a function does to its images in place must not reach what looks at them next; a group shares its source
        own = {key: source.clone() for key, source in {id(source): source for source in sources}.items()}
        given = {
            "images": [edit.clone() for edit in edits],
            "sources": [own[id(source)] for source in sources],
            "instructions": [p.instruction for p in prompts],
            "preserve": [list(p.preserve) for p in prompts],
            "target": [list(p.target) for p in prompts],
        }
        answer = self.function(**{k: v for k, v in given.items() if self._all or k in self._names})
        if isinstance(answer, RewardOutput):
            return replace(answer, parts={})  # its parts, as a TPIPSReward has them, are none of this run's
        try:
            scores = torch.as_tensor(answer)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise WrongAnswer(
                f"its answer is a {type(answer).__name__} ({reason(error)}); give a list, an array or a tensor of {len(edits)} numbers"
            ) from error
        return RewardOutput(scores, [{} for _ in edits], {}, {})


@dataclass
class Asked:
    """A source with the names and weights of its parts.

    Attributes:
        options: what stands in brackets behind the names of its parts.
        suffix: goes behind its terms and roles of aspects, which would be taken for those of another source otherwise.
        retries: so often it is asked again.
    """

    source: Source
    weights: dict[str, float]
    options: str = ""
    suffix: str = ""
    retries: int = 0


@dataclass
class Rewards:
    """Several sources, asked as one.

    Attributes:
        text: as it was written.
    """

    text: str
    asked: list[Asked] = field(default_factory=list)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by its name."""
        return {name: weight for one in self.asked for name, weight in one.weights.items()}

    def check_aspects(self, preserve: Sequence[str], target: Sequence[str]) -> None:
        """Refuses the aspects of a sample that a TPIPS reward, here or on a server, would refuse."""
        for one in self.asked:
            if isinstance(one.source, AspectSource):
                one.source.reward.check_aspects(preserve, target)

    def tpips(self) -> list[TPIPSReward]:
        """The TPIPS rewards among the sources."""
        return [one.source.reward for one in self.asked if isinstance(one.source, TPIPSSource)]

    def __call__(self, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput:
        """The weighted sum, (B,) float32 on the edits' device, and its parts; gradients reach the edits if they require it.

        Raises:
            TPIPSError: naming the source that failed at its last attempt, or whose answer is of another type or length, or
                not finite.
        """
        outputs = [_ask(one, edits, sources, prompts) for one in self.asked]
        if len(outputs) == 1:
            return outputs[0]
        device = edits[0].device
        total = torch.zeros(len(edits), dtype=torch.float32, device=device)
        aspects: list[dict[str, dict[str, float]]] = [{} for _ in edits]
        terms: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for one, output in zip(self.asked, outputs, strict=True):
            total = total + output.scores.to(device)
            parts |= {name: value.to(device) for name, value in output.parts.items()}
            terms |= {name + one.suffix: value.to(device) for name, value in output.terms.items()}
            for mine, theirs in zip(aspects, output.per_aspect, strict=True):
                mine |= {role + one.suffix: values for role, values in theirs.items()}
        return RewardOutput(total, aspects, terms, parts)


def _ask(one: Asked, edits: list[Tensor], sources: list[Tensor], prompts: Sequence[Prompt]) -> RewardOutput:
    """The weighted answer of one source, its parts under their full names; asked again where it fails."""
    names = ", ".join(one.weights)
    for attempt in range(one.retries + 1):
        try:
            output = _checked(one.source(edits, sources, prompts), len(edits))
            break
        except torch.OutOfMemoryError:  # asked again it would be full again, and what to do is said elsewhere
            raise
        except Exception as error:
            if attempt == one.retries or isinstance(error, WrongAnswer):
                kind = "" if isinstance(error, TPIPSError) else f"{type(error).__name__}: "
                raise TPIPSError(f"{names}: {kind}{reason(error)}") from error
            wait = min(2.0**attempt, LONGEST_WAIT)
            each_process.warning(
                "The reward %s failed (%s: %s); it is asked again in %.0f s.",
                names, type(error).__name__, reason(error), wait,
            )  # fmt: skip
            time.sleep(wait)
    if not output.parts:
        ((name, weight),) = one.weights.items()
        return RewardOutput(weight * output.scores, output.per_aspect, output.terms, {name: output.scores})
    if not one.options:
        return output
    parts = {name + one.options: value for name, value in output.parts.items()}
    return RewardOutput(output.scores, output.per_aspect, output.terms, parts)


def _checked(output: RewardOutput, count: int) -> RewardOutput:
    """The answer with float32 tensors and plain numbers.

    Raises:
        WrongAnswer: something in it is of another type.
        TPIPSError: it is not one finite number an edit, or its measures do not fit.
    """
    scores = _numbers("its score", output.scores)
    if scores.shape != (count,) or not bool(torch.isfinite(scores).all()):
        raise TPIPSError(f"its scores for {count} edits are {_shown(scores)}; give one finite number an edit")
    try:
        per_aspect = [
            {role: {aspect: float(value) for aspect, value in values.items()} for role, values in aspects.items()}
            for aspects in output.per_aspect
        ]
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise WrongAnswer(f"per_aspect is no list of {{role: {{aspect: number}}}}, one an edit ({error})") from error
    if len(per_aspect) != count:
        raise TPIPSError(f"per_aspect has {len(per_aspect)} entries for {count} edits; give a dict each, {{}} for none")
    if not isinstance(output.terms, dict):
        raise WrongAnswer(f"terms is a {type(output.terms).__name__}; give a dict of tensors, {{}} for none")
    terms = {name: _numbers(f"the term {name!r}", term) for name, term in output.terms.items()}
    for name, term in terms.items():
        if term.shape != (count,) or bool(torch.isinf(term).any()):  # NaN is what has not been measured
            raise TPIPSError(f"the term {name!r} for {count} edits is {_shown(term)}; give one number an edit, NaN for none")
    for number in (v for aspects in per_aspect for role in aspects.values() for v in role.values()):
        if not math.isfinite(number):
            raise TPIPSError(f"per_aspect holds {number}, which is no finite number")
    return replace(output, scores=scores, per_aspect=per_aspect, terms=terms)


def _shown(values: Tensor) -> str:
    """Numbers for a message: all of a few, else the shape, and how many are not finite and the first of those."""
    if values.numel() <= _MOST_SHOWN:
        return str(values.tolist())
    odd = values[~torch.isfinite(values)]
    found = f", of which {len(odd)} are not finite (the first is {float(odd[0])})" if len(odd) else ""
    return f"{values.numel()} numbers of shape {tuple(values.shape)}{found}"


def _numbers(name: str, values: Tensor) -> Tensor:
    """The values as float32; only a tensor of real numbers has such."""
    if not isinstance(values, Tensor) or values.is_complex():
        kind = f"of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise WrongAnswer(f"{name} is {kind}; give a tensor of real numbers, one an edit")
    return values.float()


def build_rewards(text: str, settings: RewardArguments, device: torch.device | str) -> Rewards:
    """The rewards that ``text`` names; metrics and modules are loaded.

    Args:
        settings: give what the brackets do not say.
        device: of metrics, where neither says another.

    Raises:
        ConfigError: for what cannot be read, imported or found.
        TPIPSError: from `load_metric` and `TPIPSReward`.
    """
    entries = parse_entries(text)
    for entry in entries:
        if entry.family == "tpips":
            parse_reward(entry.name)  # a typo must not cost the loading of what stands before it
    rewards = Rewards(text)
    grouped: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
    for entry in entries:
        if entry.family == "tpips":
            grouped.setdefault(entry.options, []).append(entry)
        else:
            remote = entry.family == "remote"
            retries = 0 if remote else settings.reward_retries
            weights = {entry.name + entry.suffix: entry.weight}
            rewards.asked.append(Asked(open_source(entry), weights, suffix=f"[{entry.name}{entry.suffix}]", retries=retries))
    metrics: list[Asked] = []
    for options, together in grouped.items():
        names = {entry.name + entry.suffix: entry.weight for entry in together}
        source = TPIPSSource(_tpips(together, dict(options), settings, device))
        metrics.append(Asked(source, names, options=together[0].suffix, suffix=together[0].suffix))
    rewards.asked = metrics + rewards.asked
    main = _main(rewards.asked)
    if main is not None:
        main.suffix = ""
    return rewards


def _main(asked: Sequence[Asked]) -> Asked | None:
    """The source whose terms keep their names, by which evaluation, curves and report know them.

    That is TPIPS without brackets, else the first TPIPS reward, else the first server; of functions one that is alone.
    """
    tpips = [one for one in asked if isinstance(one.source, TPIPSSource)]
    servers = [one for one in asked if isinstance(one.source, AspectSource) and not isinstance(one.source, TPIPSSource)]
    ranked = [one for one in tpips if not one.options] + tpips + servers
    return ranked[0] if ranked else asked[0] if len(asked) == 1 else None


def open_source(entry: Entry) -> Source:
    """The source that a name stands for, TPIPS rewards apart.

    Raises:
        ConfigError: there is none.
    """
    family, colon, rest = entry.name.partition(":")
    if family == "remote":
        return RemoteSource(entry.name, dict(entry.options))
    if entry.options:
        raise ConfigError(f"The reward {entry.name!r} takes no options in brackets; only tpips:... and remote:... do.")
    if colon and re.fullmatch(r"[\w.]+", family) and re.fullmatch(r"\w+", rest):
        return FunctionReward(entry.name)
    raise ConfigError(
        f"Unknown reward {entry.name!r}; there are {BUILT_IN}, and functions of yours as module:function."
    )


def _tpips(
    entries: Sequence[Entry], options: dict[str, str], settings: RewardArguments, device: torch.device | str
) -> TPIPSReward:
    odd = options.keys() - set(TPIPS_OPTIONS)
    if odd:
        raise ConfigError(f"TPIPS rewards have no option {min(odd)!r}; there are {', '.join(TPIPS_OPTIONS)}.")
    dtype = options.get("dtype", settings.reward_dtype)
    metric = load_metric(
        options.get("metric", settings.metric),
        device=options.get("device", settings.reward_device or device),
        dtype=None if dtype == "auto" else dtype,
        revision=options.get("revision", settings.metric_revision if "metric" not in options else None),
    )
    return TPIPSReward(
        ",".join(f"{entry.name}={entry.weight!r}" for entry in entries),
        metric=metric,
        gate=options.get("gate", settings.gate),
        gate_threshold=_number(options.get("gate_threshold"), settings.gate_threshold),
        gate_weight=_number(options.get("gate_weight"), settings.gate_weight) or 0.0,
    )


def _number(text: str | None, default: float | None) -> float | None:
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ConfigError(f"{text!r} in the brackets of a reward is not a number.") from None
