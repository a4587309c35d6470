# SPDX-License-Identifier: Apache-2.0
"""The backend for Ascend: it hands whole decoders to the programs of a PyPTO kernel library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    KVCache,
    LatentCache,
    LayerMemory,
    NewTensor,
    TokenBatch,
    UnsupportedError,
    new_tensor,
)
from pagoda.backend.graph import Graph
from pagoda.backend.kv_store import KVStore
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.backend.reference.sampling import sample_rows, score_rows
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import LinearWeight
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.devices import DeviceSet
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, HostGroup
from pagoda.plugins.pypto import pattern
from pagoda.plugins.pypto.contract import LibraryManifest
from pagoda.plugins.pypto.device import ChipMemory, Device
from pagoda.plugins.pypto.library import KernelLibrary, open_library
from pagoda.plugins.pypto.pool import PageBuffers, Pool, PoolStore, stand_in
from pagoda.plugins.pypto.program import DecoderPrograms
from pagoda.plugins.pypto.session import Session
from pagoda.plugins.pypto.steps import StepPlaces, plan_step
from pagoda.plugins.pypto.weights import HostLinear, prepare_linear


def open_backend(devices: DeviceSet) -> PyptoBackend:
    """The backend on some chips. Raises BackendUnavailableError: a sentence says what this machine lacks."""
    library, manifest = open_library(devices)
    return PyptoBackend(library, manifest, devices)


class PyptoBackend:
    """One rank, which may drive several chips."""

    def __init__(
        self, library: KernelLibrary, manifest: LibraryManifest, devices: DeviceSet
    ) -> None:
        self._library, self._contracts = library, manifest.contracts
        self._chips = devices.numbers
        self._session: Session | None = None
        self._pools: list[tuple[tuple[KVCache | LatentCache, ...], Pool]] = []
        """Pools by the caches of their layers."""
        self.group = Alone()
        self.memory = ChipMemory(library, devices.numbers)
        self.device = torch.device("cpu")  # what the backend is given is staged there
        chips = f"{len(self._chips)} chip{'s' if len(self._chips) > 1 else ''}"
        self.arithmetic = f"pypto ({chips}, {manifest.library})"
        self.capabilities = self._capabilities()

    def _capabilities(self) -> Capabilities:
        """The limits of all contracts of the library together."""
        limits = [contract.limits for contract in self._contracts]
        weights = {_name(contract.weight_dtype) for contract in self._contracts}
        caches = {
            _name(contract.programs["decode"].argument("keys").torch_dtype)
            for contract in self._contracts
        }
        return Capabilities(
            block_sizes=tuple(sorted({each.page for each in limits})),
            max_batch_tokens=min(each.prefill_tokens for each in limits),
            max_batch_seqs=min(each.max_batch for each in limits),
            max_model_len=min(each.max_seq for each in limits),
            mixed_steps=False,
            whole_models=True,
            weight_formats=tuple(sorted(weights)),
            kv_cache_dtypes=tuple(sorted(caches)),
            lacks_operations=tuple(name for name in OPERATIONS if name not in pattern.OPERATIONS),
        )

    def join(self, group: HostGroup) -> NoReturn:
        """Raises UnsupportedError: a rank drives all chips of a stage."""
        raise UnsupportedError(
            f"the {group.size} tensor-parallel ranks are one rank on this backend; name its chips as "
            "--devices npu:0+npu:1 and leave out --tensor-parallel-size."
        )

    # ---- caches

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,  # noqa: ARG002
    ) -> KVCache:
        """A cache that only has a shape: the pool of all layers is taken with its store."""
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return KVCache(*(stand_in(shape, kv_dtype or dtype) for _ in range(2)))

    def allocate_latent_cache(
        self,
        num_blocks: int,  # noqa: ARG002
        block_size: int,  # noqa: ARG002
        rank: int,  # noqa: ARG002
        rope_dim: int,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
        kv_dtype: torch.dtype | None = None,  # noqa: ARG002
        new: NewTensor = new_tensor,  # noqa: ARG002
    ) -> NoReturn:
        raise UnsupportedError("the PyPTO programs have no latent attention.")

    def open_kv_store(self, caches: Sequence[KVCache | LatentCache]) -> KVStore:
        """The store of the caches of all layers, in order, whose pool is taken now, in place of the one before.

        Before there is a decoder, the pool has a worker for itself, which ends with it. Raises DeviceLostError:
        the chips have too little memory.
        """
        pages, heads, page, head_dim = next(iter(caches[0].tensors.values())).shape
        if self._session is not None:
            pool = self._session.open_pool(pages)
        else:
            dtype = next(iter(caches[0].tensors.values())).dtype
            self._close_worker()
            buffers = PageBuffers((page, heads, head_dim), dtype, len(self._chips))
            device = self.memory.device = Device(self._library, [], self._chips)
            pool = Pool(device, buffers, layers=len(caches), pages=pages)
        self._pools = [(tuple(caches), pool)]
        return PoolStore(pool, caches)

    # ---- weights

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError("the PyPTO programs take no quantized weights.")

    def quantize_int4(self, values: Tensor, group_size: int) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError("the PyPTO programs take no quantized weights.")

    def quantize_blocks(self, values: Tensor, stored_format: BlockFormat) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError("the PyPTO programs take no quantized weights.")

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> HostLinear:
        known = [contract.weight_dtype for contract in self._contracts]
        return prepare_linear(parts, bias, dtype, known)

    def set_low_rank(
        self,
        maps: LowRankMaps,  # noqa: ARG002
        adapter: int,  # noqa: ARG002
        parts: Sequence[LowRank | None],  # noqa: ARG002
    ) -> NoReturn:
        raise UnsupportedError("the PyPTO programs have no adapters.")

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> NoReturn:  # noqa: ARG002
        raise UnsupportedError("the PyPTO programs have no adapters.")

    # ---- steps

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        return sample_rows(logits, table, slots)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        return score_rows(logits, token_ids, num_top)

    def attention_metadata(
        self,
        batch: TokenBatch,
        num_heads: int,  # noqa: ARG002
        cache: LayerMemory,
        group: int = 0,
    ) -> StepPlaces:
        """The places of a step's tokens in pages."""
        if not isinstance(cache, KVCache):
            raise UnsupportedError("the PyPTO programs keep keys and values alone.")
        return plan_step(batch, group, cache.keys.shape[2])

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[StepPlaces]:
        """The programs of a decoder. The first time, its weights go to the chips and leave the host.

        Raises UnsupportedError: the graph is no decoder that the library has programs for.
        Raises DeviceLostError: the chips fail.
        """
        found = pattern.find_decoder(graph, names)
        contract = pattern.choose_contract(found, self._contracts)
        caches = tuple(layer.cache for layer in found.layers)
        session = self._session
        if session is None or session.linears != found.linears:
            self._close_worker()
            session = self._session = Session(self._library, contract, self._chips, found)
            self.memory.device = session.device
        for known, pool in self._pools:
            if all(map(lambda one, other: one is other, known, caches)):
                return DecoderPrograms(session, pool)
        return DecoderPrograms(session, session.open_pool(len(caches[0].keys)))

    def _close_worker(self) -> None:
        """Ends the worker that is open, if there is one, and all that lies on its chips."""
        device, self.memory.device = self.memory.device, None
        self._session, self._pools = None, []
        if device is not None:
            device.close()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
