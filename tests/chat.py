"""Conversations for the tests, and chat templates of several kinds."""

from typing import Any

# ---- templates without marks, as most models have them

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{%- for message in messages %}"
    "{%- if loop.first %}{{- bos_token }}{%- endif %}"
    "{{- '<head>' + message.role + '</head>\\n\\n' + message.content | trim + '<|eot|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<head>assistant</head>\\n\\n' }}{%- endif %}"
)
# ---- the same with marks round all that follows the prompt for an answer

MARKED_CHATML = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- generation %}{{- message.content + '<|im_end|>\\n' }}{%- endgeneration %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKED_LLAMA3 = (
    "{%- for message in messages %}"
    "{%- if loop.first %}{{- bos_token }}{%- endif %}"
    "{%- if message.role == 'assistant' %}{{- '<head>assistant</head>\\n\\n' }}"
    "{%- generation %}{{- message.content | trim + '<|eot|>' }}{%- endgeneration %}"
    "{%- else %}{{- '<head>' + message.role + '</head>\\n\\n' + message.content | trim + '<|eot|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<head>assistant</head>\\n\\n' }}{%- endif %}"
)
# ---- marks of its own taste: the words alone, without what ends them; and instructions without tokens of their own

INSTRUCT = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}"
    "{%- elif message.role == 'assistant' %}{%- generation -%}{{- ' ' + message.content }}{%- endgeneration %}"
    "{{- eos_token }}"
    "{%- elif message.role == 'system' %}{{- '<<SYS>>' + message.content + '<</SYS>>' }}"
    "{%- else %}{{- raise_exception('only user, assistant and system speak') }}{%- endif %}"
    "{%- endfor %}"
)
SHORTENING = (  # as some reasoning models do, it leaves out of earlier answers what they thought
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content if loop.last else message.content.split('</think>')[-1] }}{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

Messages = list[dict[str, Any]]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "the cat said so"}
CONVERSATIONS: list[Messages] = [
    [user("what then?"), assistant("the cat sat on the mat.")],
    [SYSTEM, user("the other user?"), assistant("  said so, and sat "), user("so?\n"), assistant("\nwhat?")],
    [user("Größe \N{PILE OF POO}"), user("and then"), assistant("the mat"), assistant("and the cat")],
    [user("the cat"), assistant("then"), user("an end that nobody answers")],
]
