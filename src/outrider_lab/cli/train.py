"""`outrider train`: make a drafter, a model or a tokenizer from text, on this machine.

Every verb takes a folder to fill and texts to learn from. The same command again goes on with a run
that was stopped or killed. On a terminal a bar moves, elsewhere every measurement is a line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from outrider.cli.call import Call, needed
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import Meter, answer, say
from outrider.cli.session import interruptible
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ConfigError, OutriderError
from outrider_lab.cli.verb_options import (
    DEFAULT_MINUTES,
    BlockOptions,
    DFlashOptions,
    DrafterOptions,
    DraftOptions,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    PretrainOptions,
    RunOptions,
    TextOptions,
    TokenizerOptions,
)

if TYPE_CHECKING:
    from outrider_lab.train.loop import Progress as Standing
    from outrider_lab.train.medusa import HeadInit

# Between lines about one thing that takes long.
_EVERY_SECONDS = 5.0


class Preparation:
    """Hears what is done before the first step: says each thing once, and then how far it is."""

    def __init__(self, out: TextIO, *, clock: Clock = HOST_CLOCK) -> None:
        self._out, self._clock = out, clock
        self._doing, self._told = "", 0.0

    def __call__(self, doing: str, share: float) -> None:
        now = self._clock()
        if doing != self._doing:
            print(doing, file=self._out, flush=True)
        elif now - self._told >= _EVERY_SECONDS:
            print(f"{doing}: {100 * share:.0f} %", file=self._out, flush=True)
        else:
            return
        self._doing, self._told = doing, now


class TrainBar(Meter):
    """A bar that moves; elsewhere every measurement is a line."""

    def __init__(self, out: TextIO) -> None:
        super().__init__("", 1.0, out=out)
        self._out = out
        self._shown: dict[str, float] = {}

    def show(self, progress: Standing) -> None:
        told = described(progress)
        self.reach(progress.share, title=told)
        if not self.console.is_terminal and progress.figures != self._shown:
            self._shown = dict(progress.figures)
            print(f"{100 * progress.share:3.0f} %  {told}", file=self._out, flush=True)


def described(progress: Standing) -> str:
    """step 120 · loss 5.213 · 4,100 tokens/s · tokens per round 1.214"""
    parts = [
        f"step {progress.step}",
        f"loss {progress.loss:.3f}",
        f"{progress.tokens_per_second:,.0f} tokens/s",
        *(f"{name.replace('_', ' ')} {value:.3f}" for name, value in progress.figures.items()),
    ]
    return " · ".join(parts)


if TYPE_CHECKING:
    from torch import nn

    from outrider.estimate.forecast import StatedWorth
    from outrider_lab.train.loop import Trainer, TrainRecipe
    from outrider_lab.train.session import RunWish, Session, TextSession
    from outrider_lab.train.tokens import TokenOptions

    M = TypeVar("M", bound=nn.Module)


def draft(call: Call[DraftOptions]) -> int:
    """Distil a draft model from --target."""
    from outrider.models.loading import resolve
    from outrider_lab.train.setup import DraftWish, draft_recipe
    from outrider_lab.train.shapes import draft_of
    from outrider_lab.train.target import read_decoder_config

    options = call.options
    # Sizes that cannot be are refused before texts are read.
    target = read_decoder_config(resolve(options.target))
    draft_of(target, hidden_size=options.hidden, num_layers=options.layers)
    session = open_drafter(call)
    wish = DraftWish(
        hidden_size=options.hidden,
        num_layers=options.layers,
        start=options.start,
        reverse=options.reverse,
        on_policy=options.on_policy,
        temperature=options.temperature,
        dtype=options.dtype,
    )
    return train(call, session.text, draft_recipe(session, wish), target=options.target)


def pretrain(call: Call[PretrainOptions]) -> int:
    """Train a model from scratch."""
    from outrider_lab.train.setup import PretrainWish, open_pretrain

    options = call.options
    wish = PretrainWish(
        tokenizer=options.tokenizer,
        family=options.family,
        teacher=options.teacher,
        hidden_size=options.hidden,
        num_layers=options.layers,
        dtype=options.dtype,
    )
    with _before_training():
        text, recipe = open_pretrain(run_wish(call), wish)
    return train(call, text, recipe)


def tokenizer(call: Call[TokenizerOptions]) -> int:
    """Make a vocabulary."""
    from outrider_lab.train.tokenizer import make_tokenizer

    folder = Path(needed(call, "FOLDER"))
    made = make_tokenizer(folder, _words(call), call.options.size, _text_wish(call.options))
    facts = {"folder": str(folder), "num_tokens": made.num_tokens, "num_files": made.num_files}
    answer(
        call.options,
        facts | {"bytes_per_token": round(made.bytes_per_token, 3)},
        f"{folder}: {made.num_tokens} tokens from {made.num_files} files, "
        f"{made.bytes_per_token:.2f} bytes a token of them.",
    )
    return 0


def open_drafter(call: Call[DrafterOptions]) -> Session:
    """The run of whatever drafts for --target, before its recipe is made."""
    from outrider_lab.bench.requests import texts_of
    from outrider_lab.train.session import open_session

    prompts = texts_of(call.options.prompts)[: call.options.exam_prompts]
    with _before_training():
        wish = run_wish(call, tuple(prompts), call.options.written)
        return open_session(wish, call.options.target)


def run_wish(call: Call[RunOptions], prompts: tuple[str, ...] = (), written: int = 0) -> RunWish:
    from outrider_lab.train.loop import TrainPlan
    from outrider_lab.train.session import RunWish

    options = call.options
    minutes = options.minutes
    if minutes is None and options.steps is None:
        minutes = DEFAULT_MINUTES
    return RunWish(
        written=written,
        folder=Path(needed(call, "FOLDER")),
        words=_words(call),
        plan=TrainPlan(
            steps=options.steps or 0,
            seconds=60 * (minutes or 0.0),
            learning_rate=options.learning_rate,
            warmup_steps=options.warmup,
            seed=options.seed,
            save_seconds=options.save_seconds,
            measure_seconds=options.measure_seconds,
        ),
        prompts=prompts,
        batch_size=options.batch,
        window=options.window,
        text=_text_wish(options, options.held_out),
        device=options.device,
        threads=options.threads,
        fresh=options.fresh,
        heard=Preparation(sys.stderr),
    )


def train(
    call: Call[RunOptions], text: TextSession, recipe: TrainRecipe[M], *, target: str = ""
) -> int:
    """Run the recipe to its end with a bar, write the folder and say what was gained."""
    from outrider.models.heads import kind_of
    from outrider.plugins.measure.turns import provenance
    from outrider_lab.train.worth import state_worth

    trainer = text.trainer(recipe)
    folder = text.wish.folder
    if trainer.resumed:
        say(f"going on from step {trainer.standing.step} of the run in {folder}")
    with interruptible() as asked, TrainBar(sys.stderr) as bar, closing(trainer.run()) as steps:
        for progress in steps:
            bar.show(progress)
            if asked():
                break
    if asked():
        say(f"stopped at step {trainer.standing.step}; the same command goes on from there")
        return INTERRUPTED
    text.finish(trainer, recipe, target, provenance())
    worth = None
    if target:
        prompts, device = text.wish.prompts, text.wish.device
        try:
            worth = state_worth(target, folder, prompts, drafter=kind_of(folder), device=device)
        except OutriderError as error:
            # What was trained is written, and is no worse for it.
            say(f"note: what it brings here was not measured: {error}")
    _report(call, folder, trainer, target, worth)
    return 0


def _report(
    call: Call[RunOptions],
    folder: Path,
    trainer: Trainer[M],
    target: str,
    worth: StatedWorth | None,
) -> None:
    standing = trainer.standing
    before, after = standing.history[0].figures, standing.history[-1].figures
    facts: dict[str, object] = {
        "folder": str(folder),
        "steps": standing.step,
        "seconds": round(standing.seconds, 2),
        "tokens": standing.num_tokens,
        "loss": round(standing.loss, 4),
        "before": _rounded(before),
        "after": _rounded(after),
    }
    lines = [
        f"{folder}: {standing.step} steps, {standing.num_tokens} tokens, "
        f"{standing.seconds / 60:.1f} minutes, loss {standing.loss:.3f}."
    ]
    for name, value in after.items():
        lines.append(f"  {name.replace('_', ' ')}: {before.get(name, value):.3f} -> {value:.3f}")
    if worth is not None:
        best, speed_up = worth.best_k, round(worth.speed_up(worth.best_k), 3)
        facts["worth"] = {**worth.values(), "k": best, "speed_up": speed_up}
        lines.append(
            f"  drafts kept: {', '.join(f'{chance:.2f}' for chance in worth.kept)}; best K here: "
            f"{best}, about {speed_up:.2f} times as fast as without"
        )
    made = quote(str(folder))
    flags = f"--target {quote(target)} --draft {made}" if target else f"--target {made}"
    lines.append(f'  outrider generate "def add(a, b):" {flags}')
    answer(call.options, facts, "\n".join(lines))


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def _words(call: Call[TextOptions]) -> tuple[str, ...]:
    if len(call.arguments) < 2:
        raise ConfigError(
            "TEXTS is missing: there is nothing to learn from.",
            hint="name files or folders after the new folder, or the word python",
        )
    return call.arguments[1:]


def _text_wish(options: TextOptions, held_out: float = 0.0) -> TokenOptions:
    from outrider_lab.train.tokens import TokenOptions

    return TokenOptions(max_tokens=options.tokens, held_out=held_out, field=options.field)


@contextmanager
def _before_training() -> Generator[None]:
    """An interrupt while texts are read ends the process; what that means is said."""
    try:
        yield
    except KeyboardInterrupt:
        say("stopped before training began; the same command begins with the texts again")
        raise


def _of_target(call: Call[DrafterOptions], recipe_of: Callable[[Session], TrainRecipe[M]]) -> int:
    """Train what drafts for --target."""
    session = open_drafter(call)
    return train(call, session.text, recipe_of(session), target=call.options.target)


def block(call: Call[BlockOptions]) -> int:
    from outrider_lab.train.block import BlockRecipe, block_recipe, block_sizes

    asked = call.options

    def recipe(session: Session) -> BlockRecipe:
        sizes = block_sizes(
            session.target.config,
            num_places=asked.places,
            num_context=asked.context_tokens,
            num_layers=asked.layers,
        )
        return block_recipe(session, sizes, dtype=asked.dtype)

    return _of_target(call, recipe)


def dflash(call: Call[DFlashOptions]) -> int:
    from outrider_lab.train.dflash import dflash_recipe

    asked = call.options
    recipe = partial(
        dflash_recipe,
        block_size=asked.block,
        num_layers=asked.layers,
        ffn_size=asked.ffn,
        dtype=asked.dtype,
    )
    return _of_target(call, recipe)


def eagle(call: Call[EagleOptions]) -> int:
    from outrider_lab.train.eagle import eagle_recipe

    asked = call.options
    recipe = partial(
        eagle_recipe,
        draft_vocab_size=asked.draft_vocab,
        ffn_size=asked.ffn,
        num_turns=asked.turns,
        dtype=asked.dtype,
    )
    return _of_target(call, recipe)


def medusa(call: Call[MedusaOptions]) -> int:
    from outrider_lab.train.medusa import medusa_recipe

    asked = call.options
    recipe = partial(
        medusa_recipe,
        num_heads=asked.heads,
        num_layers=asked.layers,
        init=cast("HeadInit", asked.init),
        dtype=asked.dtype,
    )
    return _of_target(call, recipe)


def mtp(call: Call[MtpOptions]) -> int:
    from outrider_lab.train.mtp import mtp_recipe

    asked = call.options
    recipe = partial(mtp_recipe, num_blocks=asked.blocks, num_turns=asked.turns, dtype=asked.dtype)
    return _of_target(call, recipe)
