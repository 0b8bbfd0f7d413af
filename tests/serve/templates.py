"""Small chat templates, each with the layout of a family, and a tokenizer with their tags.

Written from the families' documented formats; what the models' own templates have beyond that
(default system texts, checks, images) is left out.
"""

from __future__ import annotations

import functools

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.checkpoints.chat import ChatTemplate
from tests import tiny_llama

# Qwen2.5: functions as JSON lines in the system's turn, calls and answers between tags.
HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen3: the same, and the reply begins with its thinking unless that is switched off.
HERMES_THINKS = (
    HERMES
    + """
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
)

# Qwen3.5 and Qwen3-Coder: calls with a tag for each parameter; the prompt begins the thinking.
XML_THINKS = """
{%- set thinks = enable_thinking if enable_thinking is defined else true %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n<function=f>\\n<parameter=p>\\nvalue\\n' }}
    {{- '</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""

# One that knows how much to think, and cannot be told not to.
EFFORT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "effort {{ reasoning_effort | default('medium') }}\n<|im_start|>assistant\n<think>\n"
)

# Llama 3's: calls without tags, which are not known here.
OTHER_CALLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
)

# GLM 4.5's: the same tag around another form.
OTHER_IN_TAGS = (
    OTHER_CALLS + "{% if tools %}<tool_call>f<arg_key>k</arg_key></tool_call>{% endif %}"
)

PLAIN = tiny_llama.TEMPLATE  # no tools, no thinking, as SmolLM2's

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KNOWN = 264 + len(TAGS)  # ids


@functools.cache
def tokenizer(template: str, tags: tuple[str, ...] = TAGS, special: bool = False) -> Tokenizer:
    """The byte tokenizer with tags as tokens, special or (as in Qwen's checkpoints) not."""
    backend = tiny_llama.byte_tokenizer()
    (backend.add_special_tokens if special else backend.add_tokens)(list(tags))
    ids = {backend.token_to_id(tag) for tag in tags} if special else set()
    return Tokenizer(
        backend,
        264 + len(tags),
        None,
        256,
        frozenset({256, 257, 258} | ids),
        ChatTemplate(template, "test"),
    )
