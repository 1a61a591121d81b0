"""The settings of a run: a dataclass for each part that all recipes share, and one for each algorithm.

``rl_recipes/parsing.py`` reads them from flags, from ``--config file.yaml``, or both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from tpips_reward.errors import TPIPSError

#: Minutes that the built-in job may take when nothing else is said: it must end within ten on two cores.
BUILTIN_MINUTES = 9.5
#: Decay of the moving average of a LoRA's weights, which is handed out: the noise of a few hundred edits moves the weights to and fro
#: from one iteration to the next.
LORA_EMA_DECAY = 0.95
#: Settings that may differ between a run and its continuation; any other would make it another run.
RESUMABLE = frozenset(
    {
        "output_dir", "resume", "overwrite", "preset", "max_steps", "max_minutes", "save_steps",
        "save_total_limit", "report_to", "threads", "sample_grids", "on_bad_row", "stop_on_hack", "reward_retries",
        "push_to_hub", "hub_model_id", "hub_private", "offload_text_encoders", "gradient_checkpointing", "recompute",
    }
)  # fmt: skip


class ConfigError(TPIPSError):
    """A flag or a setting that cannot be used; the message names it and says what to do."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EditorArguments:
    """The image editor that is trained, and its adapter."""

    editor: str = _setting("builtin", "'builtin', a Hub id such as Qwen/Qwen-Image-Edit-2511, or a pipeline folder.")
    preset: str = _setting(
        "auto", "Defaults for the editor, a file in rl_recipes/configs; 'auto' goes by the editor, 'none' uses none."
    )
    resolution: int | None = _setting(
        None,
        "Edits have about resolution x resolution pixels, in the source's aspect ratio; left out: the editor's own.",
    )
    editor_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Type of the frozen weights; 'auto' is float32 on a CPU and bfloat16 elsewhere."
    )
    guidance_scale: float = _setting(1.0, "Classifier-free guidance in rollout, replay and evaluation; 1 turns it off.")
    revision: str | None = _setting(None, "Branch, tag or commit of the editor on the Hub.")
    gradient_checkpointing: bool = _setting(
        False, "Recompute the transformer's activations in the backward pass: less memory, about a third more time."
    )
    train: Literal["lora", "full"] = _setting(
        "lora", "What trains: an adapter, or all of the transformer's weights (float32, several times the memory)."
    )
    attention_backend: str | None = _setting(
        None, "The transformer's attention kernel, by diffusers' own name: native, flash, xformers, ...; left out: its choice."
    )
    offload_text_encoders: bool = _setting(
        False, "The text encoders' weights stay in the CPU's memory, and each layer's are on the GPU while it runs."
    )
    true_cfg_scale: float | None = _setting(
        None, "FLUX.1 and Kontext: classifier-free guidance beside the distilled one; left out or 1: none."
    )
    lora_rank: int = _setting(16, "Rank of the LoRA.")
    lora_alpha: int = _setting(32, "Scale of the LoRA (alpha / rank).")


@dataclass
class RewardArguments:
    """What is optimised."""

    reward: str = _setting(
        "tpips:preserve",
        "One reward, or several with weights: 'tpips:preserve=0.7,my_module:function=0.3'; docs/recipes.md has the options.",
    )
    metric: str = _setting("builtin:late", "The TPIPS metric: 'builtin:late', 'released:late', a Hub id or a folder.")
    metric_revision: str | None = _setting(None, "Branch, tag or commit of the metric on the Hub.")
    gate: Literal["change", "none"] = _setting(
        "change", "'change' makes tpips:preserve depend on the change in the target aspects; 'none' is the plain mean."
    )
    gate_threshold: float | None = _setting(None, "Change that opens the gate fully; left out: the metric's own scale.")
    gate_weight: float = _setting(1.0, "What a closed gate costs.")
    reward_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Type of the metric's weights; 'auto' is float32 on a CPU and bfloat16 elsewhere."
    )
    reward_device: str | None = _setting(None, "Device of the metric, such as cuda:1; left out: the editor's.")
    reward_retries: int = _setting(2, "A reward of your own that fails is asked again so many times.")
    normalise: Literal["together", "separately"] = _setting(
        "together", "Several rewards are added, then normalised to advantages; or each is normalised, then added."
    )
    judge: str | None = _setting(
        None, "A reward that is measured on one edit of each group and never optimised; left out: known scenes, if any."
    )


@dataclass
class RunArguments:
    """What all recipes share: prompts, the optimizer, the evaluation, and what the run leaves behind."""

    data: str | None = _setting(None, "A JSONL file of your own edits; left out: procedural edits.")
    on_bad_row: Literal["skip", "error"] = _setting(
        "skip", "Bad rows of --data and --eval_data are named and skipped, or stop the run."
    )

    skip_saturated: bool = _setting(
        False, "Rows of --data whose edits all had the top reward, visit after visit, are skipped for some epochs."
    )
    saturated_at: float = _setting(0.95, "The lowest reward that counts as the top (--skip_saturated).")
    train_prompts: int = _setting(0, "So many procedural edits, over and over; 0: never the same twice.")

    prompts_per_iteration: int = _setting(12, "(source, instruction) pairs an iteration, over all processes.")
    num_generations: int = _setting(8, "Edits of each pair: the group.")
    samples_per_batch: int = _setting(0, "Edits in one pass through the editor; 0: all where sizes are equal.")
    num_inference_steps: int = _setting(6, "Denoising steps of a rollout.")
    eval_inference_steps: int = _setting(8, "Denoising steps in the evaluation; 0: as many as in a rollout.")

    learning_rate: float = _setting(1.6e-3, "Learning rate of AdamW.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = _setting("constant", "Decay over max_steps.")
    weight_decay: float = _setting(0.0, "Weight decay of AdamW.")
    adam_beta1: float = _setting(0.9, "First momentum of AdamW.")
    adam_beta2: float = _setting(0.999, "Second momentum of AdamW.")
    max_grad_norm: float = _setting(1.0, "Gradients are clipped to this norm.")

    ema_decay: float | None = _setting(
        None,
        "Moving average of the trained weights, which is evaluated and saved in their place; 0: none; left out: "
        f"{LORA_EMA_DECAY} for a LoRA, none for --train full.",
    )

    max_steps: int = _setting(95, "Iterations.")
    max_minutes: float | None = _setting(
        None,
        "Stop in time for the whole run, evaluation included, to end within so many minutes; 0: no limit; "
        f"left out: {BUILTIN_MINUTES} for the built-in job, no limit otherwise.",
    )
    seed: int = _setting(0, "Seed of prompts, noise and the adapter's initial weights.")
    threads: int = _setting(0, "CPU threads of a process; 0: all cores shared by the processes.")

    eval_data: str | None = _setting(
        None, "A JSONL file of edits to evaluate on, as --data but other rows; left out: procedural edits, or those of --data."
    )
    eval_samples: int = _setting(
        256,
        "Held-out edits for the evaluation before and after; 0: no evaluation. With --data and without --eval_data they are "
        "the first rows of --data, which are trained on.",
    )
    eval_seed: int = _setting(
        20_000,
        "Seed of the held-out procedural edits and of the evaluation's noise, the same for all runs. With --data and without "
        "--eval_data the noise alone: the rows are those that are trained on.",
    )
    sample_grids: int = _setting(24, "So many of them are drawn source | before | after.")

    output_dir: str = _setting("runs/grpo_edit", "Where everything goes.")
    overwrite: bool = _setting(False, "Replace the run that is in output_dir.")
    resume: bool = _setting(False, "Continue the run in output_dir with its own settings.")
    save_steps: int = _setting(10, "Iterations between checkpoints.")
    save_total_limit: int = _setting(2, "So many checkpoints are kept.")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _setting("none", "A tracker, through accelerate.")
    stop_on_hack: bool = _setting(False, "Training ends at the first sign that the reward is being fooled.")
    push_to_hub: bool = _setting(False, "Upload adapter, report and samples to the Hub at the end.")
    hub_model_id: str | None = _setting(None, "The repository on the Hub, such as me/my-editor-lora.")
    hub_private: bool = _setting(True, "A repository that is made for it is private.")


@dataclass
class GroupAdvantageArguments:
    """How rewards become advantages within a group."""

    adv_clip: float = _setting(5.0, "Advantages are clipped to this size.")
    advantage_std: Literal["group", "batch", "none"] = _setting(
        "group", "Advantages are divided by the standard deviation of the group, of the whole batch, or not at all."
    )


@dataclass
class PolicyArguments:
    """Stochastic steps and the clipped update: what recipes with a likelihood ratio share."""

    sde_window: int = _setting(2, "So many neighbouring steps are stochastic; the rest follow the ODE.")
    window: Literal["first", "slide", "random"] = _setting(
        "first", "Where they are: the first steps, a window that slides on, or a new place each time."
    )
    window_every: int = _setting(1, "Iterations before the window moves.")
    window_stride: int = _setting(1, "Steps that a sliding window moves by.")
    window_limit: int = _setting(0, "The window stays within the first so many steps; 0: wherever the rule adds noise.")
    train_steps: int = _setting(2, "So many of the stochastic steps, drawn anew each iteration, are trained on.")
    eta: float = _setting(0.7, "Noise level of the stochastic steps.")
    sde_kind: Literal["flow_sde", "dance", "cps"] = _setting("flow_sde", "Rule of the stochastic steps.")

    same_noise: bool = _setting(
        True, "The edits of a group start from the same noise, and share the work until the first stochastic step."
    )
    antithetic: bool = _setting(
        True, "Every second edit of a group takes the stochastic noise of the one before it, negated."
    )

    num_iterations: int = _setting(1, "Passes over each rollout.")
    update_each_step: bool = _setting(False, "An optimizer step after each trained denoising step, not one for all.")
    epsilon: float = _setting(1e-4, "PPO clip of the likelihood ratio.")
    ratio: Literal["plain", "guard"] = _setting(
        "plain", "'guard' is GRPO-Guard's normalised ratio; its epsilon is smaller than the plain one's by about eta."
    )
    beta: float = _setting(
        0.2, "Weight of the KL to the editor without its adapter; it damps what the noise of few samples does."
    )

    def last_sde_step(self, num_steps: int) -> int:
        """So many steps, from the first, may be stochastic: all, but with cps, which adds no noise in a last step."""
        return self.window_limit or (num_steps - 1 if self.sde_kind == "cps" else num_steps)

    def check(self, run: RunArguments) -> None:
        """Refuses settings that contradict each other.

        Raises:
            ConfigError: naming them.
        """
        steps = run.num_inference_steps
        for name, value in {"sde_window": self.sde_window, "window_limit": self.window_limit}.items():
            if value > steps:
                raise ConfigError(f"{name} is {value}, but there are only {steps} steps (num_inference_steps).")
        if self.sde_kind == "cps" and (self.eta > 1 or max(self.sde_window, self.window_limit) == steps):
            raise ConfigError(
                f"With sde_kind 'cps', eta must be at most 1 (it is {self.eta:g}) and sde_window and window_limit below "
                f"num_inference_steps (they are {self.sde_window} and {self.window_limit} of {steps}): the rule adds no "
                "noise in a last step."
            )
        if self.sde_window > self.last_sde_step(steps):
            raise ConfigError(f"sde_window is {self.sde_window}, but window_limit leaves {self.window_limit} steps to it.")
        if self.window == "slide" and self.window_stride > self.sde_window:
            raise ConfigError(
                f"window_stride is {self.window_stride}, but the window has {self.sde_window} steps (sde_window): it would "
                "never reach those between."
            )
        if self.train_steps > self.sde_window:
            raise ConfigError(
                f"train_steps is {self.train_steps}, but only {self.sde_window} steps are stochastic (sde_window)."
            )


@dataclass
class GRPOArguments(PolicyArguments, GroupAdvantageArguments):
    """Flow-GRPO, with Dance-SDE, CPS, moving windows and GRPO-Guard as options."""

    recipe: ClassVar[str] = "grpo_edit"
    least_generations: ClassVar[int] = 2
    #: Defaults of this recipe for settings that all share; those that no preset changes.
    shared: ClassVar[dict[str, Any]] = {}
    whatever_editor: ClassVar[tuple[str, ...]] = ()


@dataclass
class DDPOArguments(PolicyArguments):
    """DDPO: the same update, with each prompt's own earlier rewards in place of a group."""

    recipe: ClassVar[str] = "ddpo_edit"
    least_generations: ClassVar[int] = 1
    # A few prompts that come again, since their earlier rewards are what an edit is compared with.
    shared: ClassVar[dict[str, Any]] = {"output_dir": "runs/ddpo_edit", "train_prompts": 48}
    whatever_editor: ClassVar[tuple[str, ...]] = ()

    adv_clip: float = _setting(5.0, "Advantages are clipped to this size.")
    advantage_std: Literal["prompt", "batch"] = _setting(
        "prompt", "Advantages are divided by the standard deviation of the prompt's rewards, or of the whole batch's."
    )
    buffer_size: int = _setting(32, "So many of a prompt's latest rewards are kept.")
    min_count: int = _setting(8, "A prompt with fewer is compared with the whole batch.")

    def check(self, run: RunArguments) -> None:
        """Refuses settings that contradict each other."""
        super().check(run)
        if self.min_count > self.buffer_size:
            raise ConfigError(f"min_count is {self.min_count}, which a buffer_size of {self.buffer_size} never reaches.")


@dataclass
class NFTArguments(GroupAdvantageArguments):
    """DiffusionNFT: trained on the forward process, sampled with the ODE; no likelihoods."""

    recipe: ClassVar[str] = "nft_edit"
    least_generations: ClassVar[int] = 2
    shared: ClassVar[dict[str, Any]] = {"output_dir": "runs/nft_edit"}
    whatever_editor: ClassVar[tuple[str, ...]] = ()

    nft_beta: float = _setting(1.0, "Strength of the implicit guidance; smaller is stronger.")
    kl_weight: float = _setting(0.1, "Weight of the squared distance to the velocity of the editor without its adapter.")
    noise_levels: int = _setting(2, "Each edit is noised to so many levels in a pass.")
    noise_level_kind: Literal["schedule", "uniform", "logit_normal"] = _setting(
        "schedule", "Where they come from: the sampler's own levels, spread evenly, or mostly the middle."
    )
    num_iterations: int = _setting(1, "Passes over each rollout, with noise of their own.")
    old_decay_rate: float = _setting(0.001, "The old policy, which samples, keeps this share more of itself each iteration,")
    old_decay_most: float = _setting(0.5, "but never more than this share; 0: it is the policy itself.")

    def check(self, run: RunArguments) -> None:
        """Refuses settings that contradict each other."""
        if self.noise_level_kind == "schedule" and self.noise_levels > run.num_inference_steps:
            raise ConfigError(
                f"noise_levels is {self.noise_levels}, but the schedule has {run.num_inference_steps} "
                "(num_inference_steps); take another noise_level_kind."
            )


@dataclass
class BackpropArguments:
    """Direct backpropagation of the reward: DRaFT-K, AlignProp and ReFL."""

    recipe: ClassVar[str] = "backprop_edit"
    least_generations: ClassVar[int] = 1
    # Where the gate is closed a gradient is thirty times the others: AdamW would follow those few edits and hardly the rest.
    shared: ClassVar[dict[str, Any]] = {
        "output_dir": "runs/backprop_edit", "num_generations": 1, "prompts_per_iteration": 24, "learning_rate": 1.2e-3,
        "max_grad_norm": 0.05, "max_steps": 110,
    }  # fmt: skip
    # Presets are made for groups; here the edits of a prompt would be compared with nothing.
    whatever_editor: ClassVar[tuple[str, ...]] = ("num_generations",)

    backprop: Literal["draft", "alignprop", "refl"] = _setting(
        "draft", "The gradient goes through the last steps, through a number of them that is drawn, or through one."
    )
    last_steps: int = _setting(2, "K: the gradient reaches at most the last so many steps.")
    kl_weight: float = _setting(0.0, "Weight of the squared distance to the velocity of the editor without its adapter.")
    recompute: bool = _setting(
        False, "Recompute each denoising step and the decoder in the backward pass: memory hardly grows with K."
    )

    def check(self, run: RunArguments) -> None:
        """Refuses settings that contradict each other."""
        if self.last_steps > run.num_inference_steps:
            raise ConfigError(
                f"last_steps is {self.last_steps}, but there are only {run.num_inference_steps} steps "
                "(num_inference_steps)."
            )


Algorithm = GRPOArguments | DDPOArguments | NFTArguments | BackpropArguments
ALGORITHMS: tuple[type[Algorithm], ...] = (GRPOArguments, DDPOArguments, NFTArguments, BackpropArguments)


@dataclass
class Arguments:
    """All settings of a run; ``algorithm`` is the dataclass of the recipe that runs."""

    editor: EditorArguments
    reward: RewardArguments
    run: RunArguments
    algorithm: Any

    def to_dict(self) -> dict[str, Any]:
        """All settings in one flat dict, as ``--config`` reads them."""
        return {**asdict(self.editor), **asdict(self.reward), **asdict(self.run), **asdict(self.algorithm)}

    def ema_decay(self) -> float:
        """Decay of the moving average of the trained weights; 0 for none, as where a copy of all weights is not asked for."""
        if self.run.ema_decay is not None:
            return self.run.ema_decay
        return LORA_EMA_DECAY if self.editor.train == "lora" else 0.0

    def held_out(self) -> bool:
        """Whether the edits of the evaluation are others than those that are trained on."""
        return self.run.data is None or self.run.eval_data is not None

    def time_limit(self) -> float:
        """Seconds that the whole run may take; infinite when there is no limit."""
        minutes = self.run.max_minutes
        if minutes is None:
            minutes = BUILTIN_MINUTES if self.editor.editor == "builtin" and self.run.data is None else 0.0
        return minutes * 60.0 if minutes > 0 else float("inf")
