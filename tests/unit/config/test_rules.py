"""What does not go together in a configuration is refused, with the way out."""

from __future__ import annotations

import json
import shlex

import pytest
from tests.unit.config.conftest import STORE, Load, Refusal

from zeroband.config.time_outs import TIME_OUT_NAMES

CLIP = "--outer.robust.type=clip"
DILOCO, EAGER = "--outer.type=diloco --outer.inner_steps=8", "--outer.overlap=full --outer.merge=eager"
MADE_UP = "--data.source.type=synthetic-tokens"
FLOAT8 = "--train.float8=tensorwise"
A = '{"name": "a", "weight": 1, "source": {"type": "text"}}'
B = '{"name": "b", "weight": 2, "source": {"type": "text"}}'
C = '{"name": "c", "weight": 1, "max_passes": 2, "source": {"type": "text"}}'
BYTES = A.replace('"text"', '"text", "binary": true')
IDS = '{"name": "m", "weight": 1, "source": {"type": "synthetic-tokens"}}'


def mixed(*sources: str) -> str:
    return f"--data.sources='[{', '.join(sources)}]'"


def phases(*rows: str) -> str:
    """`rows`: the weights of one phase each, as a=1 b=0."""
    weights = [{name: float(weight) for name, weight in (one.split("=") for one in row.split())} for row in rows]
    return f"--data.phases='{json.dumps([{'from_tokens': 9, 'weights': one} for one in weights])}'"


MODEL = [
    ("--model.d_model=10 --model.n_heads=4", "model.d_model=10 is not a multiple of model.n_heads=4"),
    ("--model.d_model=12 --model.n_heads=4", "model.d_model / model.n_heads = 3 is odd"),
    ("--model.n_heads=8 --model.n_kv_heads=3", "model.n_heads=8 is not a multiple of model.n_kv_heads=3"),
    ("--model.type=transformers", "needs model.name, such as "),
    ("--model.type=transformers --model.name=m --train.init-from=x", "train.init_from='x' is for model.type='llama'"),
    ("--model.type=transformers --model.name=m --train.init-from=x", "set model.name to it"),
    (f"{FLOAT8} --train.dtype=float32", "train.float8='tensorwise' needs train.dtype = \"bfloat16\""),
    ("--train.float8=e4m3", "tensorwise"),
    (f"{FLOAT8} --data.seq_length=1000", "data.seq_length to be a multiple of 16, not 1000"),
    (f"{FLOAT8} --model.d_model=40 --model.d_ff=64", "model.d_model to be a multiple of 16, not 40"),
    (f"{FLOAT8} --model.d_ff=100", "model.d_ff to be a multiple of 16, not 100"),
    (f"{FLOAT8} --model.d_model=96 --model.n_heads=12 --model.n_kv_heads=1", "times the head size to be a multiple"),
]
TRAINING = [
    ("--train.profile.steps=15,10", "train.profile.steps=[15, 10] ends before it begins; set [10, 15]"),
    ("--train.profile.steps=0,3", "train.profile.steps[0]='0' (from --train.profile.steps): input should be greater"),
    ("--train.profile.steps=3", "train.profile.steps[1] is missing"),
    ("--train.profile={} --train.total_steps=14", "ends after the last step, train.total_steps=14"),
    ("--optim.adamw.betas=[1.0,0.95]", "optim.adamw.betas[0]"),
    ("--optim.adamw.betas=[-0.1,0.95]", "optim.adamw.betas[0]"),
    ("--optim.adamw.betas=[0.9,1.5]", "optim.adamw.betas[1]"),
    ("--outer.type=demo --optim.muon={}", "has no inner optimizer: drop [optim.muon]"),
    ("--outer.type=demo --optim.state_dtype=int8", "outer.type='demo' has none: drop it"),
    ("--outer.type=ddp --optim.state_dtype=int8", "outer.type='ddp' shares them between nodes: drop it"),
    ("--optim.state_dtype=bfloat16 --optim.adamw.betas=[0.9,0.999]", 'set "int8", or betas of at most 0.99'),
    ("--optim.state_dtype=float16", "'float32', 'bfloat16' or 'int8'"),
]
OUTER = [
    ("--outer.type=diloco --outer.inner_steps=0", "outer.inner_steps='0'"),
    ("--outer.type=diloco --outer.inner_seconds=-1", "outer.inner_seconds='-1'"),
    ("--outer.type=diloco --outer.straggler_deadline_s=0", "outer.straggler_deadline_s='0'"),
    ("--outer.type=diloco --outer.inner_steps=100 --outer.fragments=8", "multiple of outer.fragments=8; nearest: 96"),
    ("--outer.type=diloco --outer.inner_steps=4 --outer.fragments=8", "nearest: 8"),
    ("--outer.type=diloco --outer.inner_seconds=5 --outer.fragments=2 --outer.overlap=3", "overlap=3 counts steps"),
    (f"{DILOCO} --outer.fragments=4 --outer.overlap=3", "overlap=3 is longer than inner_steps / fragments = 2"),
    (f"{DILOCO} --outer.merge=eager", "has no effect where training waits"),
    (f"--outer.type=sparseloco {EAGER}", 'set outer.divisor = "members"'),
    ("--outer.type=demo --comm.codec=int8", "comm.codec='int8' is for averages"),
    ("--outer.type=sparseloco --comm.codec=fp32", "outer.values says how their values travel"),
    ("--outer.type=demo --outer.aggregator --comm.backend=gloo", 'outer.aggregator needs comm.backend = "native"'),
    (f"{DILOCO} {CLIP}", "needs comm.sites = \"off\", not 'auto'"),
    (f"{DILOCO} {CLIP} --comm.backend=gloo", 'outer.robust needs comm.backend = "native"'),
    (f"{DILOCO} {CLIP} {EAGER}", 'set outer.merge = "mix"'),
    (f"{DILOCO} --comm.sites=off {CLIP} --outer.robust.trim=0.4", "outer.robust.trim"),
    ("--outer.type=sparseloco --outer.robust.type=trimmed", 'set outer.robust.type = "clip"'),
    ("--outer.type=demo --outer.robust.type=centered_clip", 'set outer.robust.type = "clip"'),
    (f"--outer.type=demo {CLIP} --outer.aggregator=true", "outer.robust does not trust"),
    ("--outer.type=diloco --outer.clip_to_median=true", 'it is outer.robust.type = "clip" now'),
    ("--node.dialable=true", "it is node.dial_out_only, true where it was false, now"),
    ("--found=true", "it is bootstrap now"),
    ("--fault.transfer_s=7", "it is fault.gloo_timeout_s now"),
    ("--outer.type=sparseloco --outer.score.counts=true", 'set outer.robust.type = "clip"'),
    ("--outer.type=demo --outer.score={} --outer.aggregator=true", "outer.score needs each payload"),
    ("--outer.type=sparseloco --outer.score={} --data.hold_out=0", "set one of them"),
    ("--outer.type=sparseloco --outer.score.members=1", "outer.score.members"),
    ("--outer.type=diloco --outer.score={}", "outer.score"),
]
NODES = [
    (f"{DILOCO} --comm.backend=gloo --node.dial_out_only", 'node.dial_out_only=True needs comm.backend = "native"'),
    (f"{DILOCO} --comm.backend=gloo --comm.codec=bf16", "comm.codec='bf16' needs comm.backend = \"native\""),
    (f"{DILOCO} --comm.backend=gloo --comm.codec=int8", "drop comm.codec, or set"),
    (f"{DILOCO} --comm.backend=gloo --node.site=lab", "node.site='lab' needs comm.backend = \"native\""),
    (f"{DILOCO} --comm.sites=off --node.site=lab", "node.site='lab' and comm.sites=\"off\" contradict one another"),
    ("--outer.type=ddp --store.url=nodes", 'store.url="nodes" needs store.peers'),
    ("--outer.type=ddp --store.url='redis://h nodes'", 'store.url="nodes" stands alone'),
    ("--outer.type=ddp --store.url=redis://h --store.peers=a", 'store.peers are for store.url="nodes"'),
    ("--store.peers=a", 'store.peers are for store.url="nodes"'),
    ("--outer.type=ddp --store.url=nodes --store.peers=redis://a", "each is HOST or HOST:PORT"),
    ("--outer.type=ddp --store.url=nodes --store.peers=a:0", "each is HOST or HOST:PORT"),
    ("--outer.type=ddp --store.url=nodes://:secret@a", "takes no login"),
    ("--store.url=redis://h", "store.url is set but there is no [outer] section"),
    ("--outer.type=ddp --store.url=none", "outer.type='ddp' joins nodes and needs store.url"),
    ("--rollback.most=2 --outer.type=ddp", "[rollback] needs [outer] and ckpt.path"),
    ("--rollback.most=2 --ckpt.path=checkpoints", "[rollback] needs [outer] and ckpt.path"),
    ("--elastic.min-nodes=3", "elastic.start_nodes=1 is below elastic.min_nodes=3"),
]
TIME_OUTS = [
    ("--fault.lease_s=6", "fault.lease_s=6 is above fault.detect_s=5;"),
    ("--fault.detect_s=2 --fault.lease_s=3", "fault.lease_s=3 is above fault.detect_s=2;"),
    ("--fault.renew_s=2", "fault.renew_s=2 is above fault.lease_s / 3=1.66667;"),
    ("--fault.lease_s=3 --fault.renew_s=1.5", "fault.renew_s=1.5 is above fault.lease_s / 3=1;"),
    ("--fault.watch_s=3", "fault.watch_s=3 is above fault.detect_s / 2=2.5;"),
    ("--fault.detect_s=10 --fault.hung_s=9", "fault.detect_s=10 is above fault.hung_s=9;"),
    ("--fault.hung_s=900 --fault.gloo_timeout_s=700", "fault.hung_s=900 is above fault.gloo_timeout_s=700;"),
    ("--fault.gloo_timeout_s=200", "fault.hung_s=300 is above fault.gloo_timeout_s=200;"),
    ("--fault.store_s=1", "fault.detect_s=5 is above fault.store_s=1;"),
    *(
        (f"--fault.{name}={value}", f"fault.{name}='{value}' (from --fault.{name}): input should be ")
        for name in (*TIME_OUT_NAMES, "grace_s")
        for value in ("0", "-1", "inf", "nan")
    ),
    *((f"--fault.detect_s={value}", "fault.detect_s=") for value in ("0.4", "601", "nan", "soon")),
]
DATA = [
    (MADE_UP, "data.source.type='synthetic-tokens' needs data.vocab_size"),
    (f"{MADE_UP} --data.vocab_size=9 --observe.sample_prompt=a", "observe.sample_prompt needs a tokenizer, and the"),
    (f"{MADE_UP} --data.vocab_size=9 --export={{}}", "[export] needs a tokenizer, and the ids"),
    (f"{MADE_UP} --data.vocab_size=9 --data.private=true", "data.private is for documents"),
    (f"{MADE_UP} --data.vocab_size=9 --eval.sources=a=/x", "eval.sources needs a tokenizer"),
    (f"{mixed(IDS)} --data.vocab_size=9 --eval.sources=b=/x", "eval.sources needs a tokenizer"),
    ("--eval={} --data.hold_out=0", "[eval] has nothing to evaluate on: data.hold_out=0 keeps no sample"),
    ("--eval.sources=wiki", "eval.sources: 'wiki' is no NAME=PATH"),
    ("--eval.sources='a b=/x'", "eval.sources: 'a b=/x' is no NAME=PATH"),
    ("--eval.sources=a=/x,a=/y", "eval.sources names 'a' twice"),
    (f"{mixed(A, B)} --eval.sources=a=x.txt", "'a' is a name in eval.sources and in data.sources"),
    (mixed(A.replace("weight", "weigth")), "unknown key data.sources[0].weigth (from --data.sources): did you mean"),
    (mixed('{"name": "a", "weight": 1}'), "data.sources[0].source is missing"),
    (mixed(A, A.replace('"a"', '"a b"')), "data.sources[1].name='a b'"),
    (mixed(A.replace("text", "parquet")), "data.sources[0].source.paths is missing"),
    (
        mixed(A.replace("text", "texts")),
        "data.sources[0].source.type='texts' (from --data.sources); allowed: \"text\",",
    ),
    (mixed(A.replace("1", "0")), "data.sources[0].weight=0"),
    (mixed(A, A), "data.sources names 'a' twice"),
    (f"{mixed(A)} --data.source.type=synthetic", "data.source and data.sources are both set"),
    (f"{mixed(A)} --data.source.paths=x", 'by data.source.type = "text" and data.source.paths = []'),
    (mixed(C), "data.sources all have max_passes, so data may end"),
    (f"{mixed(A, B)} {phases('a=1')}", "must name all of a, b"),
    (f"{mixed(A, C)} {phases('a=0 c=1')}", "all sources with a weight in"),
    (f"{mixed(A)} {phases('a=1', 'a=1')}", "data.phases must ascend by from_tokens"),
    (phases("a=1"), "data.phases change the weights of data.sources, and there are none"),
    (mixed(A, C.replace("1", "1e-10")), "data.sources, c: weight=1e-10 of 1 is less than one sample in 2147483647"),
    (f"{mixed(A, C)} {phases('a=1e10 c=1')}", "data.sources, c: weight=1 of 1e+10 is less than"),
    (f"{mixed(BYTES)} --data.tokenizer=gpt2", 'needs data.tokenizer = "byte"'),
    (mixed(A, IDS), "mix with nothing else"),
    (mixed(IDS), "needs data.vocab_size"),
]


@pytest.mark.parametrize(("flags", "said"), [*MODEL, *TRAINING, *OUTER, *NODES, *TIME_OUTS, *DATA])
def test_what_does_not_go_together_is_refused_with_the_way_out(refusal: Refusal, flags: str, said: str) -> None:
    assert said in refusal(*shlex.split(flags), **(STORE if "outer.type" in flags else {}))


@pytest.mark.parametrize(
    "flags",
    [
        f"{MADE_UP} --data.vocab_size=9",
        f"{DILOCO} --comm.backend=gloo",
        f"{DILOCO} --comm.backend=gloo --comm.codec=fp32",
        f"{DILOCO} --node.site=lab",
        f"--outer.type=sparseloco {EAGER} --outer.divisor=members",
        "--outer.type=ddp --optim.muon={}",
    ],
)
def test_what_goes_together_is_taken(load: Load, flags: str) -> None:
    load(*flags.split(), **(STORE if "outer.type" in flags else {}))
