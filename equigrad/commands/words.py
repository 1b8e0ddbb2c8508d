"""What words each command takes: ``cli`` has them read, and shows the first line of each as what the command does."""

import argparse


def train(parser: argparse.ArgumentParser) -> None:
    """train a model: the job of a TOML file, or the embedded quickstart"""
    add = parser.add_argument
    add("job", nargs="?", help="TOML file of the job; without it, the embedded quickstart")
    add("--run", metavar="DIR", help="run folder; by default runs/<name>")
    add("--resume", action="store_true", help="go on with the run in that folder, or start it if there is none")
    add("--dry-run", action="store_true", help="print the resolved job and its size, and stop")


def schedule(parser: argparse.ArgumentParser) -> None:
    """draw how one step of a job is divided: which rank holds which tokens, when"""
    add = parser.add_argument
    add("job", nargs="?", help="TOML file of the job; without it, the embedded quickstart")
    add("--step", type=int, default=1, metavar="N", help="which step, counted from 1 (1)")
    add("--svg", metavar="FILE", help="write the drawing there as well, as an SVG")
    add("--json", metavar="FILE", help="write the whole division there as well")
    parser.epilog = (
        "Keys of the job can be overridden: --layout.cp 4 draws another layout. Nothing is trained, and no process"
        " is started, however many the layout has."
    )


def simulate(parser: argparse.ArgumentParser) -> None:
    """run a trace of jobs on a cluster: who starts when, and what sharing its network costs"""
    add = parser.add_argument
    add("trace", help="CSV file of jobs")
    add("--cluster", required=True, metavar="FILE", help="TOML file of the servers")
    add("--profile", required=True, metavar="FILE", help="CSV file: seconds of an iteration, by model and workers")
    add("--network", required=True, metavar="FILE", help="CSV file: MB of an iteration, by model and workers")
    add("--scheduler", choices=("fcfs", "shortest", "backfill"), default="fcfs", help="who starts next (fcfs)")
    add("--placement", choices=("colocate", "pack", "spread"), default="colocate", help="where (colocate)")
    sharing = ("maxmin", "proportional", "none", "fixed-penalty")
    add("--sharing", choices=sharing, default="maxmin", help="of interfaces (maxmin); the last two are baselines")
    add("--alone", choices=("trace", "profile"), default="trace", help="what tells how long jobs take alone (trace)")
    add("--phases", choices=("auto", "each", "mean"), default="auto", help="of iterations: go through each, or take"
        " mean paces; auto: each, unless there are very many")  # fmt: skip
    add("--measured", metavar="FILE", help="CSV file of what really happened; prints errors, also of the baselines")
    add("--json", metavar="FILE", help="write the result there as well, job by job")
    add("--report", metavar="FILE", help="write an HTML page: timeline of the jobs, and what was in use")
    parser.epilog = (
        "Exit code 2 where jobs wait for ever. docs/simulate.md has the columns of all files, and the model."
    )


def verify(parser: argparse.ArgumentParser) -> None:
    """a job's first steps on other layouts, against one process: the same bits, or how far they deviate"""
    add = parser.add_argument
    add("job", help="TOML file of the job")
    add("--layouts", metavar="L,L", help="dp2 (sharded), rep2 (copied), cp2, tp2, pp2, ep2, joined as in dp2+tp2")
    add("--packings", metavar="P,P", help="first_fit, best_fit")
    add("--microbatches", metavar="N,N", help="most tokens of a row")
    add("--threads", metavar="N,N", help="CPU threads of the one process")
    add("--steps", type=int, default=3, metavar="N", help="how many steps are compared (3)")
    add("--numerics", choices=("exact", "native"), help="by default as the job says")
    add("--json", metavar="FILE", help="write the result there as well")
    add("--case", help=argparse.SUPPRESS)
    parser.epilog = (
        "Exact numerics: equal in every bit, or the first difference and its ranks. Native numerics: each step"
        " starts from the exact reference's parameters, and deviations beyond what rounding explains are called a"
        " bug. Exit code 1 where anything differs. Keys of the job can be overridden: --model.num_hidden_layers 1."
    )


def evaluate(parser: argparse.ArgumentParser) -> None:
    """held-out loss, perplexity and bits per byte of a run, checkpoint or model folder"""
    add = parser.add_argument
    add("model", help="run, checkpoint or Hugging Face folder")
    add("--job", metavar="FILE", help="TOML file whose data is evaluated; by default the run's own job")
    add("--json", metavar="FILE", help="write the result there as well")
    parser.epilog = (
        "Keys of the job can be overridden: --data.held_out_sources FILE adds text to evaluate,"
        " --data.held_out_every 0 leaves the held-out documents of data.sources out, --layout.dp_shard N uses N"
        " processes. `equigrad train --help` lists every key."
    )


def generate(parser: argparse.ArgumentParser) -> None:
    """continue prompts with a run, checkpoint or model folder"""
    add = parser.add_argument
    add("model", help="run, checkpoint or Hugging Face folder")
    add("--prompt", action="append", help="text to continue; may be given several times")
    add("--prompt-file", metavar="FILE", help="one prompt a line")
    add("--max-tokens", type=int, default=200, metavar="N", help="most new tokens of each prompt (200)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this total probability (1.0)")
    add("--seed", type=int, default=0, help="of the sampling (0)")
    add("--chat", action="store_true", help="put each prompt as a user's message into the chat template")
    add("--json", metavar="FILE", help="write prompts and completions there as well")


def serve(parser: argparse.ArgumentParser) -> None:
    """answer requests over HTTP with a run, checkpoint or model folder, as OpenAI's interface has it"""
    add = parser.add_argument
    add("model", help="run, checkpoint or Hugging Face folder")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, help="0: any that is free (8000)")
    add("--slots", type=int, default=64, metavar="N", help="sequences that are decoded together (64)")
    add("--context", type=int, metavar="N", help="tokens of a prompt and its completion; by default the model's")
    add("--numerics", choices=("exact", "native"), help="by default as the run's job says")
    add("--version", type=int, default=0, metavar="N", help="of the weights, for those who ask for one (0)")
    add("--name", help="of the model; by default its folder's")
    parser.epilog = (
        "Whoever can reach the address can use the model and replace its weights. docs/rl.md has the interface."
    )


def import_(parser: argparse.ArgumentParser) -> None:
    """turn a Hugging Face model folder into a run folder"""
    add = parser.add_argument
    add("model", help="Hugging Face folder: config.json, *.safetensors, tokenizer.json")
    add("run", help="run folder to create")


def export(parser: argparse.ArgumentParser) -> None:
    """turn a run or checkpoint into a Hugging Face model folder"""
    add = parser.add_argument
    add("model", help="run, checkpoint or Hugging Face folder")
    add("folder", help="Hugging Face folder to create")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; by default as imported")
    add("--shard-mb", type=int, default=5000, metavar="MB", help="largest weights file (5000)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--merge", action="store_true", help="adapters become part of the weights (as by default)")
    what.add_argument("--adapter", action="store_true", help="write the adapters alone, as PEFT stores them")


def tokenizer(parser: argparse.ArgumentParser) -> None:
    """train a byte-level BPE tokenizer"""
    add = parser.add_argument
    add("action", choices=("train",))
    add("sources", nargs="+", help="builtin:NAME, files, globs or hf:NAME")
    add("--vocab-size", type=int, default=2048, metavar="N", help="tokens, special ones included (2048)")
    add("--out", required=True, metavar="DIR", help="folder for tokenizer.json")


def audit(parser: argparse.ArgumentParser) -> None:
    """do steps of a run again: are they what its trajectory says?"""
    add = parser.add_argument
    add("run", nargs="?", help="run folder with a trajectory (audit.enabled = true); it is not changed")
    add("--steps", metavar="A..B", help="steps to do again; by default all of the trajectory")
    add("--layout", default="one", metavar="WORDS", help="such as tp2, dp2+cp2, pp2+zero_bubble (one process)")
    add("--merge", nargs="+", metavar="REPORT", help="add up reports of one run instead")
    add("--json", metavar="FILE", help="write the report there as well")
    add("--work", help=argparse.SUPPRESS)  # of the workers: where they meet, and leave their outcome
    parser.epilog = (
        "Exit codes: 0 everything that was asked for is confirmed, 1 contradicted, 3 unverifiable (with --merge:"
        " not all steps are covered), 2 something that was given is wrong."
    )


def plan(parser: argparse.ArgumentParser) -> None:
    """choose a layout: the fastest of all that fit a cluster; and what the cost model behind it is worth"""
    add = parser.add_argument
    add("job", nargs="?", help="TOML file of the job; its own layout is not kept")
    add("--cluster", metavar="FILE", help="TOML file of the nodes, such as configs/clusters/h100x8.toml")
    add("--top", type=int, default=5, metavar="N", help="how many layouts are shown, of different degrees (5)")
    add("--unvalidated", action="store_true", help="answer also where no published run tests the cost model")
    add("--without", nargs="+", default=[], metavar="KIND=COUNT", help="plan for the cluster without so many nodes")
    add("--memory-share", type=float, metavar="S", help="of a device's memory, what may be planned with (0.9)")
    add("--write", metavar="FILE", help="write the job with the best layout there, for `equigrad train FILE`")
    add("--svg", metavar="FILE", help="draw a step with the best layout there: rows, and the pipeline's time")
    add("--json", metavar="FILE", help="write all that is printed there as well")
    add("--validate", action="store_true", help="instead: errors by published table, and what may be asked for")
    add("--constants", action="store_true", help="instead: every constant with its unit and source")
    parser.epilog = (
        "Example: equigrad plan configs/8b.toml --cluster configs/clusters/h100x8.toml. A step's time, memory of"
        " the rank that needs most, MFU and tokens per day are predictions: validated ones belong to a kind of"
        " question that published runs have confirmed, others are left out, or shown with --unvalidated and called"
        " so. A row is a micro-batch: its tokens x how many of them a data lane has in a step. Keys of the job can"
        " be overridden: --batch.tokens 4194304. Nothing is run. docs/plan.md has examples and the model."
    )


def info(parser: argparse.ArgumentParser) -> None:
    """what is in a run, a checkpoint or a model folder"""
    parser.add_argument("path", help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--json", metavar="FILE", help="write what is printed there as well")


def report(parser: argparse.ArgumentParser) -> None:
    """write a run's report.html again"""
    parser.add_argument("path", help="run folder")
