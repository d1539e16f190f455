# ruff: noqa: E501  (log lines are as long as they are)
"""An example of every failure of the model's files, the ports, the command line and the settings."""

from __future__ import annotations

import pytest

from pytest_gpuguard.diagnose import classify_text

from .failure_logs import API, INIT, LOADING, MAIN, POOLED, V1, Example, check, raised, sglang, v0, vllm

HUB = "transformers/utils/hub.py cached_file"
LOAD = "vllm/model_executor/models/qwen3_moe.py load_weights"
CONFIG = "vllm/engine/arg_utils.py create_engine_config"

MODEL = (
    Example("model.gated", "model.missing", "gated repo", raised("OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/m.", HUB)),
    Example("model.gated", "model.missing", "401 Client Error", vllm("huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: Root=1-6)", before=V1)),
    Example("model.not_found", "model.missing", "is not a local folder", raised("OSError: nosuch is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'", HUB)),
    Example("model.not_found", "model.missing", "HFValidationError", raised("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/none'.", HUB)),
    Example("model.not_found", "model.missing", "Failed to resolve 'huggingface.co'", 'error sending request: Failed to resolve \'huggingface.co\' ([Errno -3] Temporary failure in name resolution)\n'),
    Example("model.file_missing", "model.missing", "model-00001.safetensors", sglang("FileNotFoundError: [Errno 2] No such file or directory: '/m/model-00001.safetensors'")),
    Example("model.file_missing", "model.missing", "config.json", raised("FileNotFoundError: No such file or directory: '/engines/llama/config.json'", "tensorrt_llm/builder.py from_json_file")),
    Example("model.path_missing", "model.missing", "does not exist", raised("ValueError: Model path does not exist: /models/none.bin", "llama_cpp/llama.py __init__")),
    Example("model.path_missing", "model.missing", "not found", vllm("ValueError: model_path /models/none not found", before=V1)),
    Example("model.no_weights", "model.missing", "Cannot find any model weights", sglang("RuntimeError: Cannot find any model weights with `/m`")),
    Example("model.no_weights", "model.missing", "No local weights found", "No local weights found for model m and revision None\n"),
    Example("model.disk_full", "model.missing", "[Errno 28]", raised("OSError: [Errno 28] No space left on device", "huggingface_hub/file_download.py http_get")),
    Example("weights.truncated", "weights.mismatch", "MetadataIncompleteBuffer", vllm("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer")),
    Example("weights.truncated", "weights.mismatch", "PytorchStreamReader failed", "PytorchStreamReader failed reading zip archive: failed finding central directory\n"),
    Example("weights.shape_assert", "weights.mismatch", "param.size() == loaded_weight.size()", sglang("AssertionError", "sglang/srt/model_loader/weight_utils.py default_weight_loader | assert param.size() == loaded_weight.size()")),
    Example("weights.shape_assert", "weights.mismatch", "Attempted to load weight", vllm("AssertionError: Attempted to load weight (torch.Size([1024])) into parameter (torch.Size([2048]))")),
    Example("weights.shape_assert", "weights.mismatch", "Tried to load weights of size", "(Worker pid=7) Tried to load weights of size torch.Size([1024])to a parameter of size torch.Size([2048])\n"),
    Example("weights.missing", "weights.mismatch", "were not initialized from checkpoint", vllm("ValueError: Following weights were not initialized from checkpoint: {'lm_head.weight'}")),
    Example("weights.missing", "weights.mismatch", "There is no module or parameter named", vllm("ValueError: There is no module or parameter named 'vision' in Qwen3ForCausalLM")),
    Example("weights.missing", "weights.mismatch", "Missing key(s) in state_dict", '\tMissing key(s) in state_dict: "norm.weight".\n'),
    Example("weights.tgi_missing", "weights.mismatch", "lm_head.weight does not exist", raised("RuntimeError: weight lm_head.weight does not exist", "text_generation_server/utils/weights.py get_filename")),
    Example("weights.tgi_missing", "weights.mismatch", "q_proj.qweight does not exist", "rank=0 weight model.layers.0.self_attn.q_proj.qweight does not exist\n"),
    Example("weights.unknown_name", "weights.mismatch", "layers.0.mlp.experts.w13_scale", vllm("KeyError: 'layers.0.mlp.experts.w13_scale'", LOAD)),
    Example("weights.layer_name", "weights.mismatch", "gate_up_proj.input_scale", sglang("KeyError: 'model.layers.19.mlp.shared_experts.gate_up_proj.input_scale'")),
    Example("weights.missing", "weights.mismatch", "Trying to set a tensor of shape", raised("ValueError: Trying to set a tensor of shape torch.Size([8]) in \"weight\" (which has shape torch.Size([16])).", "transformers/modeling_utils.py set_module_tensor_to_device")),
    Example("weights.size_in_load", "weights.mismatch", "start (", sglang("RuntimeError: start (1536) + length (768) exceeds dimension size (1536).", "sglang/srt/layers/parameter.py load_merged_column_weight")),
    Example("weights.asserted_in_load", "weights.mismatch", "assert shard_size", vllm("AssertionError", "vllm/model_executor/layers/linear.py weight_loader | assert shard_size == loaded_weight.numel()")),
)  # fmt: skip

ARCHITECTURES = (
    Example("model.unsupported", "unsupported.model", "are not supported for now", sglang("ValueError: Model architectures ['NewForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])", before=INIT)),
    Example("model.unsupported", "unsupported.model", "does not recognize this architecture", raised(
        "ValueError: The checkpoint you are trying to load has model type `new` but Transformers does not recognize this architecture.", "transformers/models/auto/configuration_auto.py from_pretrained")),
    Example("model.unsupported", "unsupported.model", "Unsupported model type", raised("ValueError: Unsupported model type new", "text_generation_server/models/__init__.py get_model")),
    Example("model.unsupported.plain", "unsupported.model", "unknown model architecture", "llama_model_load: error loading model: unknown model architecture: 'new'\n"),
    Example("model.architecture_not_supported", "unsupported.model", "architecture new", raised("ValueError: GGUF model with architecture new is not supported yet.", "transformers/modeling_gguf_pytorch_utils.py load_gguf_checkpoint")),
    Example("model.type_key", "unsupported.model", "'new_moe'", raised("KeyError: 'new_moe'", "transformers/models/auto/configuration_auto.py __getitem__")),
)  # fmt: skip

PORTS = (
    Example("port.in_use", "port.in_use", "Address already in use", sglang("zmq.error.ZMQError: Address already in use (addr='tcp://*:32765')", before=INIT)),
    Example("port.in_use", "port.in_use", "EADDRINUSE", raised("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use")),
    Example("port.in_use", "port.in_use", "port is already allocated", "docker: Error response from daemon: driver failed programming external connectivity on endpoint x: Bind for 0.0.0.0:30000 failed: port is already allocated.\n"),
    Example("port.socket_in_use", "port.in_use", "Socket '0.0.0.0:8001' already in use", "failed to start GRPC service: Unavailable - Socket '0.0.0.0:8001' already in use\n"),
    Example("port.bind_failed", "port.in_use", "while attempting to bind", POOLED + MAIN + "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 18207): address already in use\n"),
    Example("port.bind_failed", "port.in_use", "while attempting to bind", V1 + API + "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): [errno 98] address already in use\n"),
)  # fmt: skip

ARGUMENTS = (
    Example("args.refused", "bad.args", "unrecognized arguments", "usage: launch_server.py [-h] --model-path MODEL_PATH\nlaunch_server.py: error: unrecognized arguments: --enable_metrics\n", "args"),
    Example("args.refused", "bad.args", "expected one argument", "vllm serve: error: argument --port: expected one argument\n", "args"),
    Example("args.refused", "bad.args", "unexpected argument", "error: unexpected argument '--max-batch' found\n\nUsage: text-generation-launcher [OPTIONS]\n", "args"),
    Example("args.refused.click", "bad.args", "No such option", "Usage: trtllm-serve serve [OPTIONS] MODEL\nTry 'trtllm-serve serve --help' for help.\n\nError: No such option: --tp\n", "args"),
    Example("args.refused.click", "bad.args", "Invalid value", "Error: Invalid value for '--backend': 'x' is not one of 'pytorch', 'tensorrt'.\n", "args"),
    Example("args.unknown_keyword", "bad.args", "unexpected keyword argument 'tp'", raised("TypeError: EngineArgs.__init__() got an unexpected keyword argument 'tp'", "vllm/entrypoints/llm.py __init__"), "args"),
    Example("args.parse", "bad.args", "Expecting value", raised("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "vllm/utils/argparse_utils.py parse_args"), "args"),
)  # fmt: skip

SETTINGS = (
    Example("config.no_kernel_for_size", "unsupported.config", "failed to dispatch head_dim 96", MAIN + "server_args=ServerArgs(model_path='m')\nfailed to dispatch head_dim 96\n"),
    Example("config.constraint", "unsupported.config", "greater than max_lora_rank", vllm("ValueError: LoRA rank 32 is greater than max_lora_rank 16.")),
    Example("config.constraint", "unsupported.config", "must be set", sglang("AssertionError: moe_dense_tp_size must be set to 1 here")),
    Example("config.one_of", "unsupported.config", "expects attention_backend to be one of", sglang("AssertionError: KV4 MHA expects attention_backend to be one of ['triton'], but got fa3")),
    Example("config.one_of", "unsupported.config", "is not valid for this configuration", vllm("ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['attention sinks are missing']")),
    Example("vllm.args_invalid", "unsupported.config", "gpu_memory_utilization", raised("ValueError: gpu_memory_utilization has to be in (0, 1], it is 1.5", "vllm/config/cache.py __post_init__"), phase="args"),
    Example("config.divisible", "unsupported.config", "must be divisible by", vllm("ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).", CONFIG, before=V1)),
    Example("config.divisible", "unsupported.config", "is not divisible by", sglang("ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128.")),
    Example("config.modulo_assert", "unsupported.config", "self.num_experts % self.tp_size == 0", sglang("AssertionError", "sglang/srt/layers/moe/ep_moe/layer.py __init__ | assert self.num_experts % self.tp_size == 0")),
    Example("config.quantized_shape", "unsupported.config", "not aligned with the quantized weight shape", vllm(
        "ValueError: The input size is not aligned with the quantized weight shape. This can be caused by too large tensor parallel size.")),
    Example("config.context", "unsupported.config", "is greater than the derived max_model_len", v0(
        "ValueError: User-specified max_model_len (65536) is greater than the derived max_model_len (max_position_embeddings=32768 or model_max_length=None in model's config.json).", CONFIG)),
    Example("config.gpus", "unsupported.config", "number of available GPUs", vllm(
        "ValueError: Tensor parallel size (8) cannot be larger than the number of available GPUs (4).", CONFIG, before=V1)),
    Example("config.gpus", "unsupported.config", "World size (8) is larger than the number of available GPUs", raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for ParallelConfig\n"
        "  Value error, World size (8) is larger than the number of available GPUs (4) in this node. [type=value_error]", CONFIG)),
    Example("config.requires_value", "unsupported.config", "is incompatible with", raised("ValueError: --enable-mixed-chunk is incompatible with --enable-dp-attention", "app/main.py main")),
    Example("config.requires_value", "unsupported.config", "does not support LoRA", vllm("ValueError: NewForCausalLM does not support LoRA yet.", CONFIG, before=V1)),
    Example("config.quantization", "unsupported.config", "Unknown quantization method", vllm("ValueError: Unknown quantization method: int3. Must be one of ['awq', 'fp8'].", CONFIG, before=V1)),
    Example("config.quantization", "unsupported.config", "does not match the quantization", vllm(
        "ValueError: Quantization method specified in the model config (fp8) does not match the quantization method specified in the `quantization` argument (awq).", CONFIG, before=V1)),
    Example("config.value_type", "unsupported.config", "Head size 80 is not supported", v0("ValueError: Head size 80 is not supported by PagedAttention. Supported head sizes are: [64, 96, 112, 128, 256].")),
    Example("config.value_type", "unsupported.config", "kv_cache_dtype", sglang("ValueError: Unsupported kv_cache_dtype: fp4.", before=INIT)),
    Example("config.remote_code", "unsupported.config", "trust_remote_code=True", raised("ValueError: The repository m contains custom code which must be executed to correctly load the model. You can inspect the repository content at https://hf.co/m.\n"
        "Please pass the argument `trust_remote_code=True` to allow custom code to be run.", "transformers/dynamic_module_utils.py resolve_trust_remote_code")),
    Example("config.not_implemented", "unsupported.config", "not yet supported", vllm("NotImplementedError: Pipeline parallelism is not yet supported for this model. Please use another.")),
    Example("config.not_supported", "unsupported.config", "does not support", sglang("ValueError: The model does not support pipeline parallelism.")),
    Example("config.not_supported", "unsupported.config", "does not yet support", raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, The pooling runner does not yet support chunked prefill. [type=value_error]", CONFIG)),
)  # fmt: skip

EXAMPLES = MODEL + ARCHITECTURES + PORTS + ARGUMENTS + SETTINGS


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.signature)
def test_a_failure_of_files_ports_or_settings_is_known(example: Example) -> None:
    check(example)


HEALTHY = (
    "Port 8265 is already in use, trying port 8266 instead.\n",
    "INFO 01-02 03:04:05 [api_server.py:1] Port 8000 is already in use, trying port 8001\n",
    "[2026-01-02 03:04:05] Ignore import error when loading sglang.srt.models.new: No module named 'flash_attn'\n",
    "The tokenizer you are loading from '/m' with an incorrect regex pattern. If you are sure, pass `trust_remote_code=True`.\n",
    "Some weights of NewModel were not initialized from the model checkpoint at m and are newly initialized: ['score.weight']\n",
    "WARNING 01-02 03:04:05 [config.py:1] quantization method fp8 is not supported for the vision tower, it will be ignored\n",
    "[2026-01-02 03:04:05] The expert parallel size is adjusted to be the same as the tensor parallel size[8]. ValueError is not raised\n",
)  # fmt: skip


@pytest.mark.parametrize("text", HEALTHY)
@pytest.mark.parametrize("before", [LOADING, V1], ids=["sglang", "vllm"])
def test_what_a_healthy_boot_says_about_files_is_no_failure(before: str, text: str) -> None:
    reading = classify_text(before + text, engine=None)
    assert reading.outcome == "starting", reading
