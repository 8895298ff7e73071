"""The fields of other servers' requests: what becomes of those that no model of ours has.

Tables from which docs/fields.md is made together with the models: fields that change nothing,
fields that are refused because they would change the answer, other names of fields that are
honored, and fields that clients are known to send and that may be ignored. `unknown.py` applies
them; a model of one API may have lists of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ValuePredicate = Callable[[Any], bool]


def _accept_any(_: Any) -> bool:
    return True


# Fields of OpenAI's that change nothing here, with the values for which that is true. Clients send
# them unasked.
FIELDS_WITHOUT_EFFECT: dict[str, tuple[ValuePredicate, str]] = {
    "user": (_accept_any, ""),
    "metadata": (_accept_any, ""),
    "service_tier": (_accept_any, ""),
    "safety_identifier": (_accept_any, ""),
    "verbosity": (_accept_any, ""),
    "prompt_cache_key": (_accept_any, ""),
    "prompt_cache_options": (_accept_any, ""),
    "prompt_cache_retention": (_accept_any, ""),
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
_NO_ADAPTERS = "adapters are not supported"
_NO_WEB_SEARCH = "web search is not supported"
_NO_TEMPLATES = "the chat template is the checkpoint's; send token ids to /v1/completions instead"
_USE_SYSTEM_MESSAGE = "send a message of role system as the first one"
# Fields of other servers that change the answer in a way that cannot be honored, in every API that
# has no field of the name. One that is null, false, or an empty text or list asks for nothing.
FIELDS_REFUSED_EVERYWHERE: dict[str, str] = {
    "guided_json": _CONSTRAINT_NOT_KEPT,
    "guided_regex": _CONSTRAINT_NOT_KEPT,
    "guided_choice": _CONSTRAINT_NOT_KEPT,
    "guided_grammar": _CONSTRAINT_NOT_KEPT,
    "guided_json_object": _CONSTRAINT_NOT_KEPT,
    "structural_tag": _CONSTRAINT_NOT_KEPT,
    "grammar": _CONSTRAINT_NOT_KEPT,
    "grammar_string": _CONSTRAINT_NOT_KEPT,
    "ebnf": _CONSTRAINT_NOT_KEPT,
    "regex": _CONSTRAINT_NOT_KEPT,
    "json_schema": _CONSTRAINT_NOT_KEPT,
    "format": _CONSTRAINT_NOT_KEPT,
    "stop_regex": "texts that end the answer are plain; use stop",
    "include_stop_str_in_output": "the text ends before the match of a stop text",
    "allowed_token_ids": "tokens cannot be selected; use structured_outputs",
    "bad_words": _BANS_NOT_SUPPORTED,
    "banned_strings": _BANS_NOT_SUPPORTED,
    "banned_tokens": _BANS_NOT_SUPPORTED,
    "custom_token_bans": _BANS_NOT_SUPPORTED,
    "logits_processors": "the server runs no code of a request",
    "custom_logit_processor": "the server runs no code of a request",
    "use_beam_search": "beam search is not supported",
    "num_beams": "beam search is not supported",
    "truncate_prompt_tokens": "a prompt is not shortened",
    "chat_template": _NO_TEMPLATES,
    "template": _NO_TEMPLATES,
    "documents": "documents are not part of the prompt; send them in a message",
    "messages": "of another API; this one has its own field for what is asked",
    "prompt": "of another API; this one has its own field for what is asked",
    "input": "of another API; this one has its own field for what is asked",
    "instructions": _USE_SYSTEM_MESSAGE,
    "system": _USE_SYSTEM_MESSAGE,
    "system_prompt": _USE_SYSTEM_MESSAGE,
    "lora": _NO_ADAPTERS,
    "lora_path": _NO_ADAPTERS,
    "previous_response_id": _NO_STATE,
    "conversation": _NO_STATE,
    "thread": _NO_STATE,
    "session_params": _NO_STATE,
    "audio": REFUSED_FIELDS["audio"],
    "functions": REFUSED_FIELDS["functions"],
    "function_call": REFUSED_FIELDS["function_call"],
    "prediction": REFUSED_FIELDS["prediction"],
    "image_data": "images are not supported",
    "mcp_servers": "the server runs no tools",
    "container": "the server runs no tools",
    "data_sources": "the server reads no data of its own",
    "search_parameters": _NO_WEB_SEARCH,
    "web_search_options": _NO_WEB_SEARCH,
    "moderation": REFUSED_FIELDS["moderation"],
    "enable_search": _NO_WEB_SEARCH,
    "logprob_token_ids": "log probabilities of chosen tokens are not part of answers",
    "return_hidden_states": "hidden states are not part of answers",
}


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

_VLLM = "vLLM"
_SGLANG = "SGLang"
_LLAMA_CPP = "llama.cpp"
_OLLAMA = "Ollama"
_OPENROUTER = "OpenRouter"
_LITELLM = "LiteLLM"
_WEBUI = "text-generation-webui, SillyTavern"
_UNSUPPORTED_SAMPLERS = "samplers that are not offered"
# Fields that clients send to any server, with the server whose they are. They are ignored, however
# near they are to a field of ours.
IGNORED_FIELDS: dict[str, str] = {
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"), _VLLM
    ),
    **dict.fromkeys(("priority", "request_id", "return_tokens_as_token_ids"), _VLLM),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params"), _VLLM),
    **dict.fromkeys(("vllm_xargs", "guided_decoding_backend", "length_penalty"), _VLLM),
    **dict.fromkeys(("guided_whitespace_pattern", "early_stopping"), _VLLM),
    **dict.fromkeys(("chat_template_content_format", "data_parallel_rank"), _VLLM),
    **dict.fromkeys(("thinking_token_budget", "truncation_side", "watermarking"), _VLLM),
    **dict.fromkeys(("ec_transfer_params", "repetition_detection", "return_prompt_text"), _VLLM),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning", "no_stop_trim"), _SGLANG),
    **dict.fromkeys(("rid", "extra_key", "return_cached_tokens_details"), _SGLANG),
    **dict.fromkeys(("custom_params", "bootstrap_host", "bootstrap_port"), _SGLANG),
    **dict.fromkeys(("bootstrap_room", "return_routed_experts"), _SGLANG),
    **dict.fromkeys(("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard"), _LLAMA_CPP),
    **dict.fromkeys(("n_probs", "samplers", "repeat_last_n", "timings_per_token"), _LLAMA_CPP),
    **dict.fromkeys(("return_progress", "reasoning_format", "thinking_forced_open"), _LLAMA_CPP),
    **dict.fromkeys(("post_sampling_probs", "response_fields", "penalize_nl"), _LLAMA_CPP),
    **dict.fromkeys(("min_keep", "return_tokens", "parse_tool_calls"), _LLAMA_CPP),
    **dict.fromkeys(("reasoning_budget", "reasoning_in_content", "backend_sampling"), _LLAMA_CPP),
    **dict.fromkeys(("keep_alive", "options", "num_ctx", "raw"), _OLLAMA),
    **dict.fromkeys(("provider", "models", "route", "transforms", "plugins"), _OPENROUTER),
    **dict.fromkeys(("usage", "include_reasoning", "reasoning", "preset"), _OPENROUTER),
    **dict.fromkeys(("tags", "drop_params", "allowed_openai_params", "cache"), _LITELLM),
    **dict.fromkeys(("fallbacks", "guardrails", "extra_body", "extra_headers"), _LITELLM),
    **dict.fromkeys(("num_retries", "timeout", "request_timeout"), _LITELLM),
    **dict.fromkeys(("litellm_trace_id", "litellm_session_id", "litellm_metadata"), _LITELLM),
    **dict.fromkeys(("mode", "character", "instruction_template", "api_type"), _WEBUI),
    **dict.fromkeys(("truncation_length", "do_sample", "ban_eos_token"), _WEBUI),
    **dict.fromkeys(("add_bos_token", "api_server", "sampler_order"), _WEBUI),
    **dict.fromkeys(("sampler_priority", "temperature_last", "legacy_api"), _WEBUI),
    **dict.fromkeys(
        ("top_a", "tfs", "tfs_z", "typical", "typical_p", "top_n_sigma"), _UNSUPPORTED_SAMPLERS
    ),
    **dict.fromkeys(
        ("mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta"), _UNSUPPORTED_SAMPLERS
    ),
    **dict.fromkeys(
        ("dynatemp_range", "dynatemp_exponent", "smoothing_factor"), _UNSUPPORTED_SAMPLERS
    ),
    **dict.fromkeys(("dry_multiplier", "dry_base", "dry_allowed_length"), _UNSUPPORTED_SAMPLERS),
    **dict.fromkeys(("dry_penalty_last_n", "dry_sequence_breakers"), _UNSUPPORTED_SAMPLERS),
    **dict.fromkeys(("xtc_probability", "xtc_threshold", "epsilon_cutoff"), _UNSUPPORTED_SAMPLERS),
    **dict.fromkeys(("eta_cutoff", "penalty_alpha", "no_repeat_ngram_size"), _UNSUPPORTED_SAMPLERS),
    **dict.fromkeys(("guidance_scale", "negative_prompt", "rep_pen_range"), _UNSUPPORTED_SAMPLERS),
    **dict.fromkeys(
        ("repetition_penalty_range", "encoder_repetition_penalty"), _UNSUPPORTED_SAMPLERS
    ),
    **dict.fromkeys(("thinking", "thinking_budget"), "DeepSeek, GLM, Qwen's own API"),
    **dict.fromkeys(("incremental_output", "result_format"), "Qwen's own API"),
    **dict.fromkeys(("safe_prompt", "prompt_mode"), "Mistral"),
    **dict.fromkeys(("session_id", "chat_id", "id", "title"), "Open WebUI and others"),
    **dict.fromkeys(("intent", "snippy", "copilot_cache_control"), "GitHub Copilot"),
    **dict.fromkeys(("cache_control", "betas", "inference_geo"), "Anthropic"),
    **dict.fromkeys(("speed", "diagnostics", "user_profile_id"), "Anthropic"),
    "client_metadata": "Codex",
    "user_security_context": "Azure",
    "stream_options.continuous_usage_stats": _VLLM,
    "tools.cache_control": "Anthropic",
    "tools.function.cache_control": "Anthropic",
}
