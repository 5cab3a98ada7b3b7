"""What rondo uses of vLLM beside its public interface, and what that looks like in each version.

    python benchmarks/vllm_names.py FOLDER… > benchmarks/vllm_names.tsv

FOLDER: one for each version, with the wheel's Python files: `pip download --no-deps vllm==0.33.0`, then
`unzip vllm-0.33.0-*.whl '*.py' '*/METADATA' -d vllm-0.33.0`. Nothing of it is imported or installed, so
versions for CUDA are read on any machine. A row of the table: the name (file, then class and member), what
it is (a signature without types, `class` or `attribute`), and the versions in which it is that; a name that
a version does not have is an error, but for YOUNGER. To take in another version: read it beside those that
are there, look at the rows that are new, and widen `Vllm.newer` (src/rondo/rollout/vllm/options.py) and
pyproject.toml.
`tests/rollout/test_vllm_options.py` compares the table with rondo's calls, `tests/engines/test_vllm.py` with
the vLLM that is installed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# Names that the oldest versions do not have, and rondo does without there.
YOUNGER = frozenset(
    {"v1/engine/llm_engine.py:LLMEngine.set_weight_version", "outputs.py:CompletionOutput.weight_versions"}
    | {f"outputs.py:WeightVersionSpan{member}" for member in ("", ".end", ".start", ".version")}
)
# File below the package -> class ("" for the module's own names) -> members; a class is a name itself.
USED: Mapping[str, Mapping[str, str]] = {
    "config/__init__.py": {"": "set_current_vllm_config"},
    "config/model.py": {"ModelConfig": "get_vocab_size"},
    "config/vllm.py": {"": "set_current_vllm_config"},
    "distributed/weight_transfer/base.py": {
        "WeightTransferEngine": "__init__ device finish_weight_update init_info_cls init_transfer_engine "
        "model model_config parse_update_info receive_weights shutdown start_weight_update update_info_cls "
        "update_weights vllm_config",
        "WeightTransferInitInfo": "",
        "WeightTransferUpdateInfo": "",
    },
    "distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory": "register_engine"},
    "engine/arg_utils.py": {
        "EngineArgs": "async_scheduling block_size disable_log_stats distributed_executor_backend dtype "
        "enable_lora enable_prefix_caching enable_sleep_mode enforce_eager generation_config "
        "gpu_memory_utilization kv_cache_memory_bytes load_format logprobs_mode max_cpu_loras max_lora_rank "
        "max_loras max_model_len max_num_seqs mm_processor_cache_gb model model_impl scheduling_policy seed "
        "skip_mm_profiling skip_tokenizer_init "
        "stream_interval tensor_parallel_size tokenizer trust_remote_code weight_transfer_config worker_cls "
        "worker_extension_cls"
    },
    "envs.py": {
        "": "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING "
        "VLLM_LOGGING_LEVEL VLLM_NO_USAGE_STATS VLLM_USE_V2_MODEL_RUNNER VLLM_WORKER_MULTIPROC_METHOD"
    },
    "inputs/__init__.py": {"": "MultiModalInput mm_input"},
    "logprobs.py": {"FlatLogprobs": "logprobs start_indices"},
    "lora/layers/base.py": {"BaseLayerWithLoRA": ""},
    "lora/layers/base_linear.py": {"BaseLinearLayerWithLoRA": "base_layer"},
    "lora/request.py": {"LoRARequest": "lora_name lora_int_id lora_path"},
    "model_executor/layers/vocab_parallel_embedding.py": {"ParallelLMHead": ""},
    "model_executor/model_loader/reload/layerwise.py": {
        "": "LOADING_LAYERS _place_kernel_tensors finalize_layerwise_reload get_layerwise_info "
        "initialize_layerwise_reload"
    },
    "model_executor/model_loader/reload/types.py": {"LayerReloadingInfo": "can_load load_numel reset"},
    "model_executor/models/registry.py": {"_ModelRegistry": "get_supported_archs"},
    "multimodal/__init__.py": {"": "MULTIMODAL_REGISTRY"},
    "multimodal/inputs.py": {
        "MultiModalFieldConfig": "batched flat_from_sizes shared",
        "MultiModalKwargsItem": "",
        "MultiModalKwargsItems": "from_hf_inputs",
        "PlaceholderRange": "offset length",
    },
    "multimodal/processing/__init__.py": {
        "": "BaseDummyInputsBuilder BaseMultiModalProcessor BaseProcessingInfo InputProcessingContext"
    },
    "multimodal/processing/context.py": {
        "BaseProcessingInfo": "get_mm_max_tokens_per_item get_supported_mm_limits",
        "InputProcessingContext": "model_config tokenizer",
    },
    "multimodal/processing/dummy_inputs.py": {"BaseDummyInputsBuilder": "get_dummy_mm_data get_dummy_text"},
    "multimodal/processing/processor.py": {"BaseMultiModalProcessor": "__init__"},
    "multimodal/registry.py": {"MultiModalRegistry": "create_processor"},
    "outputs.py": {
        "CompletionOutput": "finish_reason logprobs token_ids weight_versions",
        "RequestOutput": "finished num_cached_tokens outputs prompt_token_ids request_id",
        "WeightVersionSpan": "end start version",
    },
    "sampling_params.py": {
        "RequestOutputKind": "DELTA",
        "SamplingParams": "detokenize extra_args flat_logprobs ignore_eos logprobs max_tokens min_p "
        "output_kind stop_token_ids temperature top_k top_p",
    },
    "v1/core/sched/scheduler.py": {"Scheduler": "get_request_counts kv_cache_config"},
    "v1/engine/core.py": {"EngineCore": "scheduler"},
    "v1/engine/core_client.py": {"InprocClient": "engine_core shutdown"},
    "v1/engine/llm_engine.py": {
        "LLMEngine": "abort_request add_lora add_request collective_rpc engine_core from_engine_args "
        "model_config model_executor remove_lora reset_encoder_cache reset_mm_cache reset_prefix_cache "
        "set_weight_version sleep step wake_up"
    },
    "v1/executor/multiproc_executor.py": {"MultiprocExecutor": "is_failed"},
    "v1/kv_cache_interface.py": {
        "KVCacheConfig": "kv_cache_tensors num_blocks",
        "KVCacheTensor": "size",
    },
    "v1/sample/metadata.py": {"SamplingMetadata": "all_greedy all_random max_num_logprobs temperature"},
    "v1/sample/sampler.py": {
        "Sampler": "__init__ apply_temperature compute_logprobs forward greedy_sample sample use_fp64_gumbel"
    },
    "v1/worker/gpu_input_batch.py": {
        "CachedRequestState": "output_token_ids sampling_params",
        "InputBatch": "req_ids",
    },
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": "device get_model input_batch requests sampler"},
    "v1/worker/gpu_worker.py": {
        "Worker": "_weight_update_active finish_weight_update model_runner start_weight_update "
        "update_weights weight_transfer_engine"
    },
}
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def names_in(package: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, what it is) of USED, in a vLLM whose package folder this is. Raises LookupError."""
    for file, classes in USED.items():
        tree = ast.parse((package / file).read_text(encoding="utf-8"), file)
        for owner, members in classes.items():
            body = tree.body
            if owner:
                found = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == owner]
                if not found and f"{file}:{owner}" in YOUNGER:
                    continue
                yield f"{file}:{owner}", "class"
                body = found[0].body
            for member in members.split():
                name = f"{file}:{owner}.{member}" if owner else f"{file}:{member}"
                what = _what(body, member)
                if what is None and name in YOUNGER:
                    continue
                if what is None:
                    raise LookupError(f"{package} has no {name}")
                yield name, what


def _what(body: list[ast.stmt], name: str) -> str | None:
    """Says what a name of a module or class is, by its body; None: it has none. An attribute may be assigned
    in any method.
    """
    methods = [one for one in body if isinstance(one, Function)]
    for one in methods:
        if one.name == name:
            is_property = any(ast.unparse(by).endswith("property") for by in one.decorator_list)
            return "attribute" if is_property else f"({_signature(one.args)})"
    flat = [inner for one in body for inner in (one.body if isinstance(one, ast.If) else [one])]
    targets = [t for one in flat for t in _targets(one)]
    inside = [t for method in methods for one in ast.walk(method) for t in _targets(one)]
    own = [t.id for t in targets if isinstance(t, ast.Name)]
    own += [t.attr for t in inside if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"]
    imported = [one for one in body if isinstance(one, ast.ImportFrom)]
    own += [alias.asname or alias.name for one in imported for alias in one.names]
    return "attribute" if name in own else None


def _targets(statement: ast.AST) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        pairs = [one.elts if isinstance(one, ast.Tuple) else [one] for one in statement.targets]
        return [target for pair in pairs for target in pair]
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _signature(arguments: ast.arguments) -> str:
    """Writes parameters with their defaults, without types."""
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    return ast.unparse(arguments)


def version_of(folder: Path) -> str:
    """Returns the version of an unpacked wheel."""
    (metadata,) = folder.glob("vllm*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    rows: dict[tuple[str, str], list[str]] = {}
    for folder in parser.parse_args().folders:
        for row in names_in(folder / "vllm"):
            rows.setdefault(row, []).append(version_of(folder))
    for (name, what), versions in sorted(rows.items()):
        sys.stdout.write(f"{name}\t{what}\t{' '.join(versions)}\n")


if __name__ == "__main__":
    main()
