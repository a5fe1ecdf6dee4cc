"""The client on servers of the protocol, of the original one, and of something else."""

import pytest
import torch

from tests.envs.scripted_server import Scripted
from tests.envs.visual_dialogue.conftest import make_batch
from torchrl_lang.envs.visual_dialogue import RemoteModels
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round, answer_and_score, last_round_rewards

FAST = {"first_wait": 0.001, "longest_wait": 0.01}
HEALTH = (200, {"feature_size": 16, "limits": {"items": 64}})


def test_what_the_server_rejects_is_not_sent_again():
    rejected = (400, {"error": "caption is missing", "field": "caption"})
    with Scripted(HEALTH, rejected) as server:
        models = RemoteModels(server.url, **FAST)
        with pytest.raises(ValueError, match="/batch rejected the request with status 400: caption is missing"):
            models.distances(*make_batch(1)[::2])
        assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>", "expected JSON"),
        ({}, "list"),
        ([1.0, 2.0], "2 replies, expected 1"),
        (["far"], "number"),
        (b"[NaN]", "number"),
        ([True], "number"),
        ([-0.5], "greater than or equal to 0"),
        ([1e300], "less than or equal to"),
    ],
)
def test_replies_that_are_none_of_the_protocol(reply, message):
    with Scripted(HEALTH, (200, reply)) as server, pytest.raises(ValueError, match=f"(?s){server.url}.*{message}"):
        RemoteModels(server.url).distances(*make_batch(1)[::2])


def test_steps_and_health_that_are_none_of_the_protocol():
    for reply in (["yes"], [["yes"]], [[1.0, "yes"]], [["yes", -1.5]], [["yes", True]]):
        with Scripted(HEALTH, (200, reply)) as server, pytest.raises(ValueError, match="The reply of http"):
            RemoteModels(server.url).answer_and_score(*make_batch(1))
    for health in ({}, {"feature_size": 0, "limits": {"items": 64}}, {"feature_size": 16}, []):
        with Scripted((200, health)) as server, pytest.raises(ValueError, match="give the feature_size"):
            RemoteModels(server.url)


def test_the_bytes_of_the_original_protocol():
    """As the original client sends them: a form with a JSON history, and replies of JSON."""
    dialogue = Dialogue("a cat & a dog", (Round("is it wet?", "no"),))
    with Scripted((200, ["yes", 0.25]), (200, 0.5)) as server:
        models = RemoteModels(server.url + "/", feature_size=2)
        features = torch.tensor([[0.5, -0.25]])
        assert answer_and_score(models, [dialogue], ["is it red?"], features) == (["yes"], [0.25])
        assert last_round_rewards(models, [dialogue._replace(rounds=())], features) == [0.5]
    method, path, kind, body = server.seen[0]
    assert (method, path, kind) == ("POST", "/step_rank", "application/x-www-form-urlencoded")
    assert body == (
        b"history=%5B%7B%22speaker%22%3A+%22question%22%2C+%22text%22%3A+%22is+it+wet%3F%22%7D%2C+%7B%22speaker%22%3A+"
        b"%22answer%22%2C+%22text%22%3A+%22no%22%7D%2C+%7B%22speaker%22%3A+%22question%22%2C+%22text%22%3A+%22is+it+red"
        b"%3F%22%7D%5D&caption=a+cat+%26+a+dog&img_features=%5B0.5%2C+-0.25%5D"
        b"&generation_kwargs=%7B%22inference%22%3A+%22greedy%22%2C+%22beamSize%22%3A+1%7D"
    )
    assert server.seen[1][1] == "/fetch_reward_rank"


def test_values_of_an_original_server_are_sums_of_its_rewards():
    dialogue = Dialogue("a", (Round("b?", "c"), Round("d?", "e")))
    with Scripted(*[(200, reward) for reward in (2.0, 0.5, 0.25, 0.25, 0.5, -0.125)]) as server:
        models = RemoteModels(server.url, feature_size=2)
        assert models.distances([dialogue], torch.ones(1, 2)).tolist() == [2.0 - 0.5 - 0.25]
        assert models.percentiles([dialogue], torch.ones(1, 2)).tolist() == [0.25 + 0.5 - 0.125]
    assert [seen[1] for seen in server.seen] == ["/fetch_reward"] * 3 + ["/fetch_reward_rank"] * 3
