"""`outrider generate`: complete one prompt."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from outrider.cli.call import Call
from outrider.cli.conversation import given_prompt
from outrider.cli.output import Painter, answer, fitted, prose, say
from outrider.cli.session import open_llm, run_record, show, show_notes, structure_of
from outrider.cli.verb_options import GenerateOptions
from outrider.cli.verdict import RoundsPage, details, headline, is_cut, say_toy
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.api.callers import Prompt
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult
    from outrider.plugins.measure.compare import Comparison


def generate(call: Call[GenerateOptions]) -> int:
    if call.options.prompts is None:
        return _complete(call)
    from outrider.plugins.measure.compare import compare_prompts

    return compare_prompts(call, lambda line: print(line, flush=True))


def _complete(call: Call[GenerateOptions]) -> int:
    shown, resolved = call.options, call.resolved
    text = _prompt_of(call)
    structure = structure_of(shown)
    llm = open_llm(resolved, details=shown.stats)
    prompt, is_message = given_prompt(llm, text, shown, resolved.program().target)
    if shown.compare:
        from outrider.plugins.measure.compare import check_drafts

        check_drafts(llm)
    page = RoundsPage(llm, resolved)
    page.turn(shown.html, flag="--html")
    params = page.asking(resolved.sampling())
    if params.n > 1:
        return _several(llm, (text, prompt), call, page)
    painter = None if shown.json else Painter(resolved.program().color, sys.stdout)
    stream = llm.stream(prompt, params, **structure)
    if painter is not None and not shown.quiet:
        say_toy(resolved.program().target)
    if painter is not None and painter.colored and not is_message:
        painter.write(text)
    reply = show(llm, stream, painter)
    if painter is not None:
        painter.write("" if shown.quiet else painter.mark(cut=is_cut(reply.result)))
        painter.close_text(() if shown.quiet else reply.seen)
    show_notes([reply.result])
    comparison = None
    if shown.compare:
        from outrider.plugins.measure.compare import compare_with_off

        comparison = compare_with_off(llm, prompt, call, reply.result)
    if painter is not None and not shown.quiet:
        painter.line(verdict(reply.result, comparison, everything=shown.stats))
    speed_ratio = comparison.summary() if comparison else ""
    _say_line(page.add(text, [reply.result], speed_ratio=speed_ratio))
    record = reply.result.to_dict() | {"run": run_record(llm, resolved)}
    if comparison:
        record["compare"] = comparison.to_dict()
    if resolved.engine().profile:
        record["profile"] = _profile(llm, prompt, call, reply.result)
    answer(shown, record, None)
    return 0


def verdict(
    result: GenerationResult, comparison: Comparison | None, *, everything: bool = False
) -> str:
    speedup, same = (comparison.headline(), comparison.same) if comparison else ("", "")
    lines = [prose(headline(result, speedup=speedup, same=same, more="--max-tokens N"))]
    if everything:
        lines += [details(result), *([comparison.summary()] if comparison else [])]
    return fitted("\n".join(lines))


def _profile(
    llm: LLM, prompt: Prompt, call: Call[GenerateOptions], result: GenerationResult
) -> dict[str, Any]:
    """Return the record of `--profile`; for people, also print it in short."""
    from outrider.plugins.measure.profile import profile_of, profile_text

    found = profile_of(llm, prompt, call, result)
    if not call.options.json and not call.options.quiet:
        print(fitted(profile_text(found)))
    return found


def _say_line(line: str) -> None:
    if line:
        say(line)


def _several(
    llm: LLM, given: tuple[str, Prompt], call: Call[GenerateOptions], page: RoundsPage
) -> int:
    """Run `--n`: all completions at once. `given` is the prompt as typed, and for the model."""
    shown = call.options
    if shown.compare:
        raise ConfigError("--compare needs one completion, and --n requests more.", hint="drop one")
    params = page.asking(call.resolved.sampling())
    text, prompt = given
    results = llm.generate([prompt], params, **structure_of(shown))
    if not shown.json:
        if not shown.quiet:
            say_toy(call.resolved.program().target)
        painter = Painter(call.resolved.program().color, sys.stdout)
        for number, result in enumerate(results, start=1):
            if not shown.quiet:
                line = verdict(result, None, everything=shown.stats)
                print(fitted(f"── {number} of {len(results)}: {line}"))
            painter.pieces([f"{result.text}\n\n"], ["plain"])
    show_notes(results)
    _say_line(page.add(text, results))
    record = {
        "completions": [
            result.to_dict() | ({"profile": result.profile()} if result.rounds else {})
            for result in results
        ],
        "run": run_record(llm, call.resolved),
    }
    answer(shown, record, None)
    return 0


def _prompt_of(call: Call[GenerateOptions]) -> str:
    """Return the prompt: argument, --prompt or stdin. Raises ConfigError unless there is one."""
    options, word = call.options, call.named.get("PROMPT")
    given = [text for text in (word, options.prompt) if text is not None]
    if len(given) + options.stdin > 1 or len(call.arguments) > len(call.named):
        raise ConfigError(
            "two prompts: give one, as a word, by --prompt or on stdin.",
            hint="drop one; --model names a model",
        )
    if word is not None:
        _check_no_model(word)
    if given:
        return given[0]
    if not options.stdin:
        raise ConfigError("no prompt.", hint='outrider generate "def f(x):", or - to read stdin')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ConfigError("the prompt on stdin is not UTF-8 text.") from None


def _check_no_model(prompt: str) -> None:
    """Check the PROMPT argument. Raises ConfigError if it is a model."""
    path = Path(prompt)
    if not path.name:
        return
    is_model = path.suffix == ".gguf" and len(prompt.split()) == 1
    # A prompt may not be a valid path.
    with suppress(OSError, ValueError):
        is_folder = (path / "config.json").is_file() or any(path.glob("*.gguf"))
        is_model = is_model or is_folder or (path.suffix == ".gguf" and path.is_file())
    if is_model:
        raise ConfigError(
            f"{prompt} is a model, and no prompt is given.",
            hint=f"outrider chat {quote(prompt)}, or outrider generate {quote(prompt)} PROMPT; "
            "to use these words as a prompt, give --prompt",
        )
