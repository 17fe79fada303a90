"""The device mesh a case asks for."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdpcheck.adapters.contract import Setup

REPLICATE, SHARD = "replicate", "shard"


def mesh_of(setup: Setup) -> DeviceMesh:
    """One axis to shard over, or with replicas two (HSDP): rank = replica * dp_shard + position in the replica."""
    replicas, shards = setup.mesh.dp_replicate, setup.mesh.dp_shard
    if replicas == 1:
        return init_device_mesh(setup.device.type, (shards,), mesh_dim_names=(SHARD,))
    return init_device_mesh(setup.device.type, (replicas, shards), mesh_dim_names=(REPLICATE, SHARD))
