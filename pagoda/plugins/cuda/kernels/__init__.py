# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the GPU backend, one code for NVIDIA and AMD, as plain functions over tensors of the device.

Every function launches its kernels on the current stream and returns at once: it reads nothing back, allocates
nothing, and takes all launch geometry from shapes and Python numbers, so that it may be captured in a graph. What
changes from step to step lies in tensors. Outputs are given (`out`), and are fully written, but for rows that a
metadata tensor marks as absent. Activations are float32 and contiguous in their rows; a first dimension of 0 is
allowed everywhere. With `TRITON_INTERPRET=1` in the environment before triton is imported, all of it runs on CPU
tensors, in float32 and float16: the interpreter's bfloat16 is not right.

A row's bits depend on the row alone: tiles and places where sums are cut are fixed, whatever the number of rows.

`rows` (x, out [n, d] float32 unless said otherwise): `OPERATIONS` there, outputs behind inputs and weights, and

    rms_norm(x, weight[d], out, *, eps, delta=None, total=None)
        total = x + delta (may be x itself), out = its norm
    select_rows(x[n, d], rows[m] int64, out[m, d])     x of float32 or int64
    embedding(token_ids[n] int64, table[v, d], out, *, first_id)     table of any float dtype; foreign rows are 0
    argmax(logits[n, v], out[n, 3] int64, *, first_id)     what `linear_argmax` gives of the outputs of `linear`

`kv`: `slots` [n] int64 is block id times block size plus offset, -1 for a row that writes nothing (padding):

    rotate_and_cache(qkv, slots, keys, values, out, *, cosines=None, sines=None, query_norm=None, key_norm=None,
                     eps=0.0, squares=None, key_scales=None, value_scales=None)
        squares [n, 2] float32 is scratch, given where norms are of all heads together
        keys, values [num_blocks, kv_heads, block_size, head_dim] of float32, bfloat16, float16, float8_e4m3fn or
        int8 with scales [num_blocks, kv_heads, block_size] float32; out [n, heads head_dim]; table [n, r / 2]
    rotate_and_cache_latents(queries, latents, slots, cache, norm[rank], out, *, eps, cosines=None,
                             sines=None, scales=None)
        cache [num_blocks, 1, block_size, rank + rope_dim], scales [num_blocks, 1, block_size]

`attention`:

    tokens_per_tile(queries_per_key) -> int     query tokens of one tile, at most; `latents` has its own, of heads
    Steps(positions[n] int32 (-1: padding), tiles[t, 3] int32, context_lens[s] int32, block_tables[s, b] int32)
        a step's places. A tile is (sequence, first row, number of rows) of up to `tokens_per_tile` neighbouring
        rows of one sequence; sequence -1 for padding, which computes nothing
    plan_tiles(query_lens[s], per_tile) -> Tensor [t, 3] int32, on the host
    Partials.new(rows, heads, value_dim, max_context, device)     scratch of split contexts; serves all layers
    attention(queries, keys, values, steps, out, *, scale, window=None, chunk=None, softcap=None, causal=True,
              sinks=None, key_scales=None, value_scales=None, products=torch.bfloat16, partials=None,
              split_programs=16, segment=SEGMENT)
        queries, out [n, heads head_dim]; products are of float32, float16 or bfloat16 numbers, summed in float32.
        Without `partials` one program goes through a tile's whole context (prompts); with them, up to
        `split_programs` share it (decode). Bits are the same.

`latents`:

    latent_attention(latent_queries, rotary_queries, cache, steps, out, *, rank, scale, scales=None,
                     products=torch.bfloat16, partials=None, split_programs=16, segment=SEGMENT)

`states`: halves [num_blocks, floats] float32 of states in blocks; tiles of `steps` are whole sequences:

    short_conv(x, weight[width, channels], halves, steps, out[n, channels], *, block_size, bias=None, gated=False,
               activated=False)
        x [n, channels], or [n, 3 channels] where it is gated; width is at most `MAX_CONV_WIDTH`
    gated_delta(qkv, gates[n, 2 heads], decay[heads], dt_bias[heads], halves, steps, out[n, heads value_dim], *,
                block_size, key_heads, key_dim)

`linear`: weights [out, in]:

    linear(x, weight, out, *, bias=None, on_hopper=False)     weight of float32, float16 or bfloat16; bfloat16
        rounds x, which may be bfloat16 already
    fp8_linear(x, values, scales[out, groups], out, *, size, dtype, bias=None)     (`Fp8Weight`), x as for `dtype`
    fp8_embedding(token_ids, values, scales, out, *, first_id, size)
    head_linear(x[n, heads in], addresses[heads] int64, out[n, heads out], *, dtype)

`low_rank`:

    add_low_rank(out, x, adapters[n] int64, table[slots, parts, 4] int64, narrow, *, outputs, dtype)
    narrow_width(max_rank) -> int     elements of scratch for a row and a part

`quantized`:

    RoundedRows.new(n, inputs, device), round_rows(x, into)     integers of a row by one scale (`Int8Weight`)
    int8_linear(rounded, values, scales, out, *, zero_points=None, bias=None)     out may be columns of wider rows
    RoundedGroups.new(n, inputs, group_size, device), round_groups(x, into, *, order=None)     (`GroupedWeight`)
    grouped_linear(rounded, codes, scales, out, *, bits, offsets=None, bias=None)
    int8_embedding(token_ids, values, scales, out, *, first_id, zero_points=None)
    grouped_embedding(token_ids, codes, scales, out, *, first_id, bits, offsets=None)

`experts`:

    ExpertWeights(gate, up, down [e] int64 addresses, dtype, first, inner, gate_bias=None, up_bias=None,
                  down_bias=None, scales=None)     scales of weights of 8-bit floats
    Workspace.new(rows, hidden, inner, per_token, held, device)
    experts(x, logits, out, weights, workspace, *, routing, activation, counts, correction=None, valid=None)
        `valid` [1] int64, number of rows that are not padding

`block_weights`: weights in blocks of GGUF, and of whole rows:

    Blocks(stored_format, inputs, planes, widths, codebook, scales, minima, block_scales, block_minima)
    block_linear(rounded, weight, out, *, bias=None)     rounded in groups of 16, or as rows for whole rows
    block_embedding(token_ids, table, out, *, first_id)

`quantized_experts`:

    QuantizedMap(addresses[e, 8] int64, outputs, inputs, form, has_bias)
    quantized_experts(x, logits, out, weights, workspace, rounded, *, routing, ...)     as `experts`

`sampler` (kernels in `sampling`):

    pack_rows(table, slots) -> PackedRows, in host memory; `.to(device)` copies them
    Found.new(rows, most, device)     results; `.token_ids` on the device, `.sampled()` and `.scored()` wait
    sample(logits[r, v], packed, changed, found); score(logits, token_ids, found)

`blocks`:

    gather_blocks(tensor[num_blocks, ...], block_ids[m] int64, out[m, block_bytes] uint8, *, offset)
    scatter_blocks(tensor, block_ids, source[m, block_bytes] uint8, *, offset)
        bytes of one tensor of each block at `offset` of a row; rows are laid out as `KVStore.read` has them
"""
