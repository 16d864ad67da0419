"""Chat templates that an operator may name for a checkpoint that has none, or a wrong one.

Each writes turns of text as the models of its family were trained on them; tools are described in
text.
"""

from __future__ import annotations

from pathlib import Path

from outrider.core.errors import ConfigError, nearest
from outrider.core.fields import shown
from outrider.core.files import FileKind, read_text

_ALTERNATING = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns here') }}{% endif %}"
)


def _template(turns: str, answer: str, begin: str = "") -> str:
    """A template of its beginning, each message `m`, and the opening of an answer."""
    opened = "{% if add_generation_prompt %}{{ '" + answer + "' }}{% endif %}"
    return begin + "{% for m in messages %}" + turns + "{% endfor %}" + opened


NAMED_TEMPLATES = {
    # Qwen, SmolLM2, Hermes and others.
    "chatml": _template(
        r"{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        r"<|im_start|>assistant\n",
    ),
    # Gemma 1 to 3.
    "gemma": _template(
        _ALTERNATING
        + r"{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' }}"
        r"{{ m.content | trim + '<end_of_turn>\n' }}",
        r"<start_of_turn>model\n",
        "{{ bos_token }}",
    ),
    # Llama 3, 3.1, 3.2 and 3.3.
    "llama3": _template(
        r"{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        r"{{ m.content | trim + '<|eot_id|>' }}",
        r"<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{ bos_token }}",
    ),
    # Mistral 7B 0.1 and 0.2, Mixtral.
    "mistral": _template(
        _ALTERNATING + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}",
        "",
        "{{ bos_token }}",
    ),
    # Mistral Nemo and later ones with its vocabulary.
    "mistral-nemo": _template(
        _ALTERNATING + "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}",
        "",
        "{{ bos_token }}",
    ),
    # Phi-3 and Phi-3.5.
    "phi3": _template(
        r"{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", r"<|assistant|>\n"
    ),
    # Zephyr, TinyLlama.
    "zephyr": _template(r"{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}", r"<|assistant|>\n"),
}


def template_source(given: str) -> str:
    """Source of the template that `given` names: one of NAMED_TEMPLATES, or a Jinja file. Raises
    ConfigError for neither."""
    if given in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[given]
    names = ", ".join(NAMED_TEMPLATES)
    try:
        return read_text(Path(given), FileKind.TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigError(
            f"chat_template: {shown(given)} is no name of a template, and cannot be read: {why}.",
            hint=nearest(given, NAMED_TEMPLATES, f"--chat-template takes a Jinja file, or {names}"),
        ) from None
