"""The rules of an audit, each a question with one function that answers it."""

from __future__ import annotations

from rollstore.diagnose.rules import comparison, context, distributions, endings, groups, record, rewards, weights
from rollstore.diagnose.rules.rule import Found, Rule, Verdict

__all__ = ["RULES", "Found", "Rule", "Verdict"]

RULES = (
    Rule(
        id="rebuild-tokens",
        question="Can every record rebuild its tokens and its mask?",
        advice="Record the ids exactly as the model saw them, with a mask over all of them.",
        check=record.rebuild_tokens,
    ),
    Rule(
        id="rebuild-roles",
        question="Can every record rebuild which token came from whom?",
        advice="Record spans with role and origin (the recorder and the engine writers do) that cover all tokens.",
        check=record.rebuild_roles,
    ),
    Rule(
        id="rebuild-alignment",
        question="Can log-probs be laid on the tokens they belong to?",
        advice="Score the tokens again (`rollstore evaluate`) or leave these rollouts out of training.",
        check=record.rebuild_alignment,
    ),
    Rule(
        id="actions-reconcile",
        question="Does everything that counts actions count the same number?",
        advice="Look at one with `rollstore show ID --tokens`: its last line says which column differs.",
        check=record.actions_reconcile,
    ),
    Rule(
        id="zero-rewards",
        question="Have unscored, tool failure, task failure and truncation become the same zero reward?",
        advice="Write reward null with its reward_status for what was not judged; for a limit that is part of the task "
        "write bootstrap false.",
        check=rewards.zero_rewards,
    ),
    Rule(
        id="distributions",
        question="Which distributions are present, and is each log-prob of a known one that can be a denominator?",
        advice="Record logprob_kind, and log-probs of the distribution that drew (behavior).",
        check=distributions.distributions,
        limits={"require": ()},
    ),
    Rule(
        id="sampler-recorded",
        question="Is the sampler of every action recorded, and was it honoured?",
        advice="Record the sampler of every request with its defaults written out.",
        check=distributions.sampler_recorded,
    ),
    Rule(
        id="versions-per-token",
        question="Are weight versions known per token, or only claimed?",
        advice="Let the engine report the version with each chunk of tokens, not once a request.",
        check=weights.versions_per_token,
    ),
    Rule(
        id="template-constant",
        question="Did the chat template change within a run?",
        advice="Give the new template a run of its own, or train on one side of the change.",
        check=weights.template_constant,
    ),
    Rule(
        id="tokenizer-constant",
        question="Did the tokenizer change within a run?",
        advice="Give the new tokenizer a run of its own: equal ids no longer mean equal text.",
        check=weights.tokenizer_constant,
    ),
    Rule(
        id="endings-fit",
        question="Do endings fit what was drawn (length reached, but `stop`)?",
        advice="Take the ending from the engine's finish reason; record stop_token_ids so that a stop at the very "
        "limit can be told from a cut.",
        check=endings.endings_fit,
    ),
    Rule(
        id="segments-complete",
        question="Do the segments of every rollout follow each other to an end?",
        advice="Wait for the writers, or `rollstore recover`; leave unfinished rollouts out of training.",
        check=endings.segments_complete,
    ),
    Rule(
        id="groups-complete",
        question="Are prompt groups complete and scored?",
        advice="Drop incomplete groups (drop_incomplete), or say why members are missing.",
        check=groups.groups_complete,
    ),
    Rule(
        id="groups-variance",
        question="Do prompt groups carry signal?",
        advice="Choose prompts that are neither always solved nor never; measure the scorer's floor (`rollstore "
        "floor`).",
        check=groups.groups_variance,
        limits={"most": 0.5, "floor": 0.0},
    ),
    Rule(
        id="context-edits",
        question="Did an edit of the context drop a system or user constraint?",
        advice="Keep system and user spans in the edited context, and record the dropped range.",
        check=context.context_edits,
    ),
    Rule(
        id="logprobs-above-zero",
        question="Are there log-probs above zero?",
        advice="The number is of no distribution: look for penalties or noise added after the softmax.",
        check=distributions.logprobs_above_zero,
    ),
    Rule(
        id="logprobs-missing",
        question="Are log-probs missing?",
        advice="Ask the engine for the log-prob of the drawn token, or score again (`rollstore evaluate`).",
        check=distributions.logprobs_missing,
    ),
    Rule(
        id="logprobs-floored",
        question="Are there log-probs that stand in for minus infinity?",
        advice="Record null for what the engine did not say; a stand-in becomes a ratio of zero or infinity.",
        check=distributions.logprobs_floored,
    ),
    Rule(
        id="duplicate-ids",
        question="Does every id have one content?",
        advice="Write each rollout under one id, once; `rollstore verify` names the parts.",
        check=distributions.duplicate_ids,
    ),
    Rule(
        id="equal-time",
        question="Does a comparison of synchronous and asynchronous runs have throughput, data age and quality at "
        "equal time?",
        advice="Record started_at and finished_at of rollouts, weight_version of uses, and rewards in every run.",
        check=comparison.equal_time,
    ),
    Rule(
        id="resume-policy",
        question="Is it recorded what a resume does to queues, samplers, tools and context?",
        advice="Put resume.queue, resume.sampler, resume.tools and resume.context into the metadata of the run's "
        "rollouts.",
        check=context.resume_policy,
    ),
    Rule(
        id="engines-gated",
        question="Which engines run without a passed numerical check?",
        advice="Run `rollstore gate`, and put its id into engine.numerics.gate of what the engine records.",
        check=weights.engines_gated,
    ),
)
"""All rules, in the order they are asked."""
