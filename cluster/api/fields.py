"""The fields of other servers' requests: what becomes of those that no request class of ours has.

Tables from which docs/fields.md is made together with the request classes: fields that change
nothing, fields that are refused because they would change the answer, other names of fields that
are honored, and fields that clients are known to send and that may be ignored, samplers among
them. `unknown.py` applies them; the class of one API may have lists of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ValuePredicate = Callable[[Any], bool]  # whether a value is accepted


ANY_VALUE: tuple[ValuePredicate, str] = (lambda _: True, "")
# Fields of OpenAI's that change nothing here, with the values for which that holds.
FIELDS_WITHOUT_EFFECT: dict[str, tuple[ValuePredicate, str]] = {
    **dict.fromkeys(("user", "metadata", "service_tier", "safety_identifier"), ANY_VALUE),
    **dict.fromkeys(("verbosity", "prompt_cache_key", "prompt_cache_options"), ANY_VALUE),
    "prompt_cache_retention": ANY_VALUE,
    "store": (lambda value: value is False, "nothing is stored; only false is possible"),
    "modalities": (lambda value: value == ["text"], 'only ["text"] is possible'),
    "best_of": (lambda value: value == 1, "only 1 is possible; ask for several outputs with n"),
    "suffix": (lambda value: value == "", "insertion is not supported"),
}
# Fields of OpenAI's that are refused, each with its own reason.
REFUSED_FIELDS: dict[str, str] = {
    "audio": "audio is not supported",
    "function_call": "deprecated; use tool_choice",
    "functions": "deprecated; use tools",
    "moderation": "moderation is not supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
}

_CONSTRAINT_NOT_KEPT = (
    "this constraint would not be kept; use structured_outputs or response_format"
)
_NO_STATE = "nothing is stored between requests; send the whole conversation"
_BANS_NOT_SUPPORTED = "tokens and texts cannot be banned; use logit_bias with token ids"
_FIELD_OF_ANOTHER_API = "of another API; this one has its own field for what is asked"
_NO_TEMPLATES = "the chat template is the checkpoint's; send token ids to /v1/completions instead"
_USE_SYSTEM_MESSAGE = "send a message of role system as the first one"
# Fields of other servers that change the answer in a way that cannot be honored, in every API that
# has no field of the name. One that is null, false, an empty text or list, or the one of
# `NEUTRAL_VALUES`, asks for nothing. Samplers are ignored instead (`_IGNORED_SAMPLERS`).
FIELDS_REFUSED_EVERYWHERE: dict[str, str] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), _CONSTRAINT_NOT_KEPT),
    **dict.fromkeys(("guided_grammar", "guided_json_object", "ebnf"), _CONSTRAINT_NOT_KEPT),
    **dict.fromkeys(("structural_tag", "grammar", "grammar_string"), _CONSTRAINT_NOT_KEPT),
    **dict.fromkeys(("regex", "json_schema", "format"), _CONSTRAINT_NOT_KEPT),
    "stop_regex": "texts that end the answer are plain; use stop",
    "include_stop_str_in_output": "the text ends before the match of a stop text",
    "allowed_token_ids": "tokens cannot be selected; use structured_outputs",
    **dict.fromkeys(("bad_words", "banned_strings"), _BANS_NOT_SUPPORTED),
    **dict.fromkeys(("banned_tokens", "custom_token_bans"), _BANS_NOT_SUPPORTED),
    "logits_processors": "the server runs no code of a request",
    "custom_logit_processor": "the server runs no code of a request",
    **dict.fromkeys(("use_beam_search", "num_beams"), "beam search is not supported"),
    "guidance_scale": "guidance is not supported",
    "truncate_prompt_tokens": "a prompt is not shortened",
    **dict.fromkeys(("chat_template", "template"), _NO_TEMPLATES),
    "documents": "documents are not part of the prompt; send them in a message",
    **dict.fromkeys(("messages", "prompt", "input"), _FIELD_OF_ANOTHER_API),
    **dict.fromkeys(("instructions", "system", "system_prompt"), _USE_SYSTEM_MESSAGE),
    **dict.fromkeys(("lora", "lora_path"), "adapters are not supported"),
    **dict.fromkeys(("previous_response_id", "conversation", "thread"), _NO_STATE),
    "session_params": _NO_STATE,
    "image_data": "images are not supported",
    **dict.fromkeys(("mcp_servers", "container"), "the server runs no tools"),
    "data_sources": "the server reads no data of its own",
    **dict.fromkeys(("search_parameters", "enable_search"), REFUSED_FIELDS["web_search_options"]),
    "logprob_token_ids": "log probabilities of chosen tokens are not part of answers",
    "return_hidden_states": "hidden states are not part of answers",
    **REFUSED_FIELDS,
}
# What programs send with every request that asks for nothing of the kind.
NEUTRAL_VALUES: dict[str, object] = {"num_beams": 1, "guidance_scale": 1}


def _is_empty(value: Any) -> bool:
    return not value


def _names_no_format(value: Any) -> bool:
    return not (isinstance(value, dict) and value.get("format"))


# Fields that other paths honor and without which the answer would be another, with the values that
# ask for nothing. They are refused where they are not honored.
FIELDS_OF_OTHER_PATHS: dict[str, tuple[ValuePredicate, str]] = {
    **dict.fromkeys(
        ("response_format", "structured_outputs", "output_format"),
        (_is_empty, "this path does not constrain the answer by it; /v1/chat/completions does"),
    ),
    **dict.fromkeys(
        ("text", "output_config"),
        (_names_no_format, "this path takes no format in it; use that of /v1/chat/completions"),
    ),
    "tools": (_is_empty, "this path has no tools; /v1/chat/completions has"),
    "tool_choice": (lambda value: value in ("auto", "none"), "this path has no tools"),
    "parallel_tool_calls": (lambda value: value is not False, "this path does not honor it"),
    "n": (lambda value: value == 1, "this path makes one output"),
    "modalities": FIELDS_WITHOUT_EFFECT["modalities"],
    "echo": (_is_empty, "only /v1/completions repeats the prompt"),
    # 0 asks for those of the prompt's own tokens.
    "prompt_logprobs": (
        lambda value: value is False,
        "prompts are not scored by this path; /v1/completions does",
    ),
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "return_token_ids"),
        (_is_empty, "not part of answers here; ask /v1/chat/completions"),
    ),
    **dict.fromkeys(
        ("logit_bias", "stop_token_ids", "min_tokens", "cache_salt"),
        (_is_empty, "this path does not honor it; /v1/chat/completions does"),
    ),
    **dict.fromkeys(
        ("chat_template_kwargs", "continue_final_message"),
        (_is_empty, "this path does not honor it; /v1/chat/completions does"),
    ),
}
# What clients look for in `error.details.error_code`: after it, they send the whole conversation.
ERROR_CODE_BY_FIELD = {"thread": "thread_unsupported_request"}

# Names that other servers have for fields that are honored here. One is ignored beside the field
# that it stands for, and refused alone.
FIELD_SYNONYMS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_length": ("max_tokens", "max_output_tokens"),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "min_length": ("min_tokens",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "stopping_strings": ("stop", "stop_sequences"),
    "repeat_penalty": ("repetition_penalty",),
    "rep_pen": ("repetition_penalty",),
    "random_seed": ("seed",),
    "sampler_seed": ("seed",),
    "logit_biases": ("logit_bias",),
    "enable_thinking": ("chat_template_kwargs", "thinking"),
    "think": ("reasoning_effort", "reasoning", "thinking"),
}

# Fields that clients send to any server, by the server whose they are. They are ignored, however
# near they are to a field of ours.
_IGNORED_NAMES_BY_SERVER = {
    "vLLM": """
        skip_special_tokens spaces_between_special_tokens add_special_tokens priority request_id
        return_tokens_as_token_ids mm_processor_kwargs media_io_kwargs kv_transfer_params vllm_xargs
        guided_decoding_backend length_penalty guided_whitespace_pattern early_stopping
        chat_template_content_format data_parallel_rank thinking_token_budget truncation_side
        watermarking ec_transfer_params repetition_detection return_prompt_text
        stream_options.continuous_usage_stats
    """,
    "SGLang": """
        separate_reasoning stream_reasoning no_stop_trim rid extra_key return_cached_tokens_details
        custom_params bootstrap_host bootstrap_port bootstrap_room return_routed_experts
    """,
    "llama.cpp": """
        cache_prompt id_slot slot_id n_keep n_discard n_probs samplers repeat_last_n
        timings_per_token return_progress reasoning_format thinking_forced_open post_sampling_probs
        response_fields penalize_nl min_keep return_tokens parse_tool_calls reasoning_budget
        reasoning_in_content backend_sampling
    """,
    "Ollama": "keep_alive options num_ctx raw",
    "OpenRouter": """
        provider models route transforms plugins usage include_reasoning reasoning preset
    """,
    "LiteLLM": """
        tags drop_params allowed_openai_params cache fallbacks guardrails extra_body extra_headers
        num_retries timeout request_timeout litellm_trace_id litellm_session_id litellm_metadata
    """,
    "text-generation-webui, SillyTavern": """
        mode character instruction_template api_type truncation_length do_sample ban_eos_token
        add_bos_token api_server sampler_order sampler_priority temperature_last legacy_api
    """,
    "DeepSeek, GLM, Qwen's own API": "thinking thinking_budget",
    "Qwen's own API": "incremental_output result_format",
    "Mistral": "safe_prompt prompt_mode",
    "Open WebUI and others": "session_id chat_id id title",
    "GitHub Copilot": "intent snippy copilot_cache_control",
    "Anthropic": """
        cache_control betas inference_geo speed diagnostics user_profile_id tools.cache_control
    """,
    "Codex": "client_metadata",
    "Azure": "user_security_context",
}
# Samplers that are not offered. They only change which token is drawn, and chat programs send a
# full set of them with every request, in use or not: refused, they would keep such programs out.
# A negative prompt does nothing without a guidance scale, which is refused.
_IGNORED_SAMPLERS = """
    top_a tfs tfs_z typical typical_p top_n_sigma mirostat mirostat_mode mirostat_tau mirostat_eta
    dynatemp_range dynatemp_exponent smoothing_factor dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold epsilon_cutoff eta_cutoff
    penalty_alpha no_repeat_ngram_size rep_pen_range repetition_penalty_range
    encoder_repetition_penalty negative_prompt
"""
# What each of these ignored fields belongs to; one of an object has its path. Unknown ones that are
# not listed are ignored too, unless they look like one of ours misspelled.
IGNORED_FIELDS: dict[str, str] = {
    **{n: server for server, names in _IGNORED_NAMES_BY_SERVER.items() for n in names.split()},
    **dict.fromkeys(_IGNORED_SAMPLERS.split(), "samplers that are not offered"),
}
