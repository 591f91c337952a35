"""Rollouts for verl 0.9.1 by Hugging Face's own model code on CPU: the replica, its server, the adapter that loads it.

It decides how a prompt becomes tokens: one at a time, without a cache, because the model is tiny. An abort ends every
running request at its next token and hands out what there is, as vLLM and SGLang do; so the weights never change under
a request. It knows nothing of how weights come; it writes down what its parameters hold after each load (`witness`).
Loaded by VERL_USE_EXTERNAL_MODULES; `actor_rollout_ref.rollout.name=hf_cpu`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
import witness
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

NAME = "hf_cpu"
#: A request looks for an abort before each token; a token of a model that fits here takes milliseconds.
ABORT_SECONDS = 30.0
#: Requests of one agent loop worker, and room for the calls that abort, load and resume.
CALLS_AT_ONCE = 64
NamedTensors = list[tuple[str, torch.Tensor]]


def server_name(replica_rank: int) -> str:
    """Under which name Ray knows the server of a replica."""
    return f"{NAME}_server_{replica_rank}"


class Server:
    """One replica's model. All methods run on one event loop; only `_sample` runs on threads."""

    def __init__(self, model_path: str, response_length: int, replica_rank: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # two trainers and two rollouts share the machine's cores
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._parameters = dict(self._model.named_parameters())
        self._eos = self._model.config.eos_token_id
        self._response_length = response_length
        self._replica_rank = replica_rank
        #: The step that the parameters come from; None until the first load is complete.
        self._global_steps: int | None = None
        #: Set: requests run. Cleared: running ones end with "aborted", new ones wait or, if rejecting, end at once.
        self._gate = asyncio.Event()
        self._gate.set()
        self._rejecting = False
        self._running: dict[str, asyncio.Future[Any]] = {}

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_media: Any
    ) -> TokenOutput:
        """Tokens and their log-probabilities, until the model's end of sequence, the limit or an abort."""
        if not self._gate.is_set() and self._rejecting:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=self._fields())
        await self._gate.wait()
        limit = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self._response_length
        fields = self._fields()  # before the first token: an abort lets no load pass while a request runs
        work = asyncio.ensure_future(
            asyncio.to_thread(
                self._sample, list(prompt_ids), int(limit), float(sampling_params.get("temperature", 1.0))
            )
        )
        self._running[request_id] = work
        try:
            tokens, log_probs, reason = await work
        finally:
            del self._running[request_id]
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason=reason, extra_fields=fields)

    def _fields(self) -> dict[str, Any]:
        return {"global_steps": self._global_steps}

    @torch.inference_mode()
    def _sample(self, prompt: list[int], limit: int, temperature: float) -> tuple[list[int], list[float], str]:
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < limit:
            if not self._gate.is_set():
                return tokens, log_probs, "aborted"
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            choices = torch.log_softmax(logits / temperature, -1)
            token = int(torch.multinomial(choices.exp(), 1))
            tokens.append(token)
            log_probs.append(float(choices[token]))
            if token == self._eos:
                break
        return tokens, log_probs, "completed"

    async def load(self, batch: NamedTensors) -> None:
        """Copies tensors into the parameters of the same names."""
        with torch.no_grad():
            for name, tensor in batch:
                self._parameters[name].copy_(tensor)

    async def loaded(self, global_steps: int | None) -> None:
        """All parameters are now those of the step."""
        digests = {name: witness.digest(parameter) for name, parameter in self._parameters.items()}
        witness.write_down(f"{witness.REPLICA}{self._replica_rank}", global_steps, {"digests": digests})
        self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Returns when no request runs any more; from then until `resume_generation`, none begins."""
        self._rejecting = reject_request
        self._gate.clear()
        aborted = dict(self._running)
        if aborted:
            _, late = await asyncio.wait(aborted.values(), timeout=ABORT_SECONDS)
            if late:
                raise TimeoutError(f"{len(late)} of {len(aborted)} requests still run {ABORT_SECONDS} s after an abort")
        return {"aborted_count": len(aborted), "request_ids": list(aborted)}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._gate.set()

    async def set_global_steps(self, global_steps: int | None) -> None:
        self._global_steps = global_steps

    # There is no cache of keys and values, nothing that sleeps, nothing that profiles: verl calls these all the same.

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self, **_options: Any) -> None: ...

    async def start_profile(self, **_options: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class Replica(RolloutReplica):
    """One server per replica, on the same machine; its name is how the adapter finds it."""

    async def launch_servers(self) -> None:
        actor = ray.remote(Server).options(
            name=server_name(self.replica_rank), num_cpus=0, max_concurrency=CALLS_AT_ONCE
        )
        server = actor.remote(self.model_config.path, self.config.response_length, self.replica_rank)
        await server.set_global_steps.remote(None)  # the model is loaded when this returns
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


class ServerAdapter(BaseRollout):
    """Lives in verl's CheckpointEngineWorker: takes what a back end received and hands it to the replica's server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = 0, **_: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_options: Any,
    ) -> None:
        """Hands the weights on in buckets; a tensor is copied, because a back end may use its memory again.

        Writes down how long the first tensor took to come, and how long it took from there until all were loaded.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"this rollout loads named tensors, not {wire_format!r}")
        server = ray.get_actor(server_name(self.replica_rank))
        bucket: NamedTensors = []
        nbytes = 0
        began, came = time.perf_counter(), None
        async for name, tensor in ensure_async_iterator(weights):
            came = came or time.perf_counter()
            bucket.append((name, tensor.detach().to("cpu", torch.bfloat16, copy=True)))
            nbytes += bucket[-1][1].nbytes
            if nbytes >= self._bucket_bytes:
                await server.load.remote(bucket)
                bucket, nbytes = [], 0
        await server.load.remote(bucket)
        await server.loaded.remote(global_steps)
        ended = time.perf_counter()
        facts = {"pull_s": (came or ended) - began, "load_s": ended - (came or ended)}
        witness.write_down(f"{witness.WORKER}{self.replica_rank}", global_steps, facts)

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"
