"""Chat templates of model vendors: those in TRL's package, and short ones in the style of further families."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.support.e2e.small_job import make_tokenizer

_TRAINING = "_training"
_SPECIAL = re.compile(
    r"<\|[^<>|\s']+\|?>|<[^<>|\s'/]+\|>|<\uff5c[^<>\uff5c']+\uff5c>|</?s>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]"
)
"""Special tokens as the families write them."""
_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_CHATML_END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
FAMILIES = {
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index >= messages | length - 1 %}{{ '[AVAILABLE_TOOLS]' ~ (tools | tojson) }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}{{ '[TOOL_CALLS]' ~ (m.tool_calls | tojson) ~ eos_token }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('only user, assistant and tool roles') }}{% endif %}{% endfor %}",
    "llama 2": "{% if messages[0].role == 'system' %}"
    "{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<s>[INST] ' + (first if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}{% endfor %}",
    "smollm2": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    + _CHATML_END,
    "smollm3": "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if not loop.last and '</think>' in content %}{% set content = '<think>\n\n</think>\n' + "
    "content.split('</think>')[-1] | trim %}{% endif %}{{ '<|im_start|>assistant\n' + content.lstrip('\n') + "
    "'<|im_end|>\n' }}{% elif m.role == 'tool' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _CHATML_END,
    "phi 4": "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    "granite": "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
    "'<|end_of_text|>\n' }}{% if loop.last and add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}{% endfor %}",
    "tulu": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '' if loop.last and m.role == 'assistant' else '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
    "qwq": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + "
    "m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + "
    "m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    "kimi": "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call_begin|>' + c.function.name + '<|tool_call_argument_begin|>' + "
    "(c.function.arguments | tojson) + '<|tool_call_end|>' }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
    "ends with eos": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "ends with return": "{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}"
    "{% endif %}{{ '<|channel|>final' }}{% endif %}{{ '<|message|>' + m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
}
"""Family -> a template that writes conversations as the family's own template does, without its rare options."""


def trl_templates() -> tuple[dict[str, str], dict[str, str]]:
    """(name -> vendor's template, name -> TRL's training variant) of the installed TRL; empty without TRL.

    TRL is not imported, since its own requirements are not installed.
    """
    found = find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}, {}
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    training = {name.removesuffix(_TRAINING): text for name, text in texts.items() if name.endswith(_TRAINING)}
    return {name: text for name, text in texts.items() if not name.endswith(_TRAINING)}, training


def without_marks(template: str) -> str:
    """A template with its {% generation %} tags replaced by others that leave the same text."""
    begins_replaced = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", begins_replaced)


def tokenizer_for(templates: Iterable[str]) -> PreTrainedTokenizerBase:
    """A small byte-level tokenizer with the special tokens that the templates write."""
    special = {token for template in templates for token in _SPECIAL.findall(template)}
    special |= {f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
    special |= {f"<|im_{role}|>" for role in ("system", "user", "assistant", "tool")}
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(sorted(special))
    tokenizer.add_tokens(list(_ADDED))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|endoftext|>")
