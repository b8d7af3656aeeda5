"""The indexers of transformers' DeepseekV32 and GlmMoeDsa, watched, and rounded as an index cache of a dtype rounds."""

import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from rounded import E4M3_MAX, TORCH

INDEX_DIM = 128


def hadamard():
    """Sylvester's order, orthogonal."""
    h = torch.ones(1, 1)
    while len(h) < INDEX_DIM:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * INDEX_DIM**-0.5


HADAMARD = hadamard()


def rotate(x, cos, sin, interleaved):
    """RoPE of the first elements. Rotated pairs stay where they are, as in DeepSeek's code: transformers' GLM puts evens before odds, which
    no product sees, but a Hadamard transform would."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    x = x.clone()
    rope = x[..., : 2 * half]
    a, b = (rope[..., 0::2], rope[..., 1::2]) if interleaved else (rope[..., :half], rope[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    a.copy_(turned[0]), b.copy_(turned[1])
    return x


def round_to(x, dtype):
    """e4m3 with a scale for each 128, a power of two ("ue8m0")."""
    if dtype != "e4m3":
        return x.to(TORCH[dtype]).float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / E4M3_MAX
    mantissa, exponent = torch.frexp(largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(TORCH[dtype]).float() * scale


class Watched:
    """Within it a model's indexers round to a dtype ("f32": they are left as they are), and the first sequence's lists are kept."""

    def __init__(self, model, dtype):
        self.dtype, self.topk = dtype, model.config.index_topk
        self.indexers = [m for m in model.modules() if isinstance(m, (DeepseekV32Indexer, GlmMoeDsaIndexer))]
        self.indices = [[] for _ in self.indexers]
        # One for each sequence.
        self.clear = torch.ones(1)

    def __enter__(self):
        for at, indexer in enumerate(self.indexers):
            indexer.forward = self.forward_of(at, indexer)
        return self

    def __exit__(self, *_):
        for indexer in self.indexers:
            del indexer.forward

    def forward_of(self, at, indexer):
        as_it_is = indexer.forward

        @torch.no_grad()
        def forward(x, q_resid, position_embeddings, mask, position_ids=None, cache=None):
            if self.dtype == "f32":
                # Scores are computed a second time, to see how clear the list is.
                indices = as_it_is(x, q_resid, position_embeddings, mask, position_ids, cache=cache)
                keys = cache.layers[indexer.layer_idx].indexer_keys
                q = self.query(indexer, q_resid)
                q = rotate(q, *(c.unsqueeze(2) for c in position_embeddings), is_interleaved(indexer))
                if is_interleaved(indexer):
                    q = torch.cat([q[..., 0:64:2], q[..., 1:64:2], q[..., 64:]], -1)
            else:
                q, keys = self.rounded(indexer, x, q_resid, position_embeddings, cache)
            weights = indexer.weights_proj(x) * indexer.n_heads**-0.5
            scores = torch.relu(torch.einsum("bshd,btd->bsht", q, keys) * indexer.softmax_scale)
            scores = torch.einsum("bsh,bsht->bst", weights, scores)
            is_seen = mask if mask.dtype == torch.bool else mask == 0
            scores = scores.masked_fill(~is_seen, float("-inf"))
            best = scores.topk(min(self.topk + 1, scores.shape[-1]), -1)
            self.look(scores, best.values)
            if self.dtype != "f32":
                indices = best.indices[..., : self.topk].int()
            self.keep(at, indices[0], is_seen[0])
            return indices

        return forward

    def query(self, indexer, q_resid):
        return indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, INDEX_DIM))

    def rounded(self, indexer, x, q_resid, position_embeddings, cache):
        cos, sin = position_embeddings
        transformed = lambda x, cos, sin: round_to(rotate(x, cos, sin, is_interleaved(indexer)) @ HADAMARD, self.dtype)
        q = transformed(self.query(indexer, q_resid), cos.unsqueeze(2), sin.unsqueeze(2))
        k = transformed(indexer.k_norm(indexer.wk(x)), cos, sin)
        return q, cache.update_indexer(k, indexer.layer_idx)

    def look(self, scores, best):
        """How clear the lists are that leave tokens out."""
        if best.shape[-1] > self.topk:
            last, after = best[..., self.topk - 1], best[..., self.topk]
            gap = (last - after) / scores.masked_fill(scores.isinf(), 0).abs().amax(-1)
            self.clear = gap.masked_fill(after.isinf(), 1.0).amin(-1).minimum(self.clear)

    def keep(self, at, indices, is_seen):
        for row, seen in zip(indices, is_seen):
            list_ = sorted(i for i in row.tolist() if seen[i])
            self.indices[at].append(list_ + [-1] * (self.topk - len(list_)))

    def lists(self):
        return torch.tensor(self.indices, dtype=torch.int32)


def is_interleaved(indexer):
    return isinstance(indexer, GlmMoeDsaIndexer)
