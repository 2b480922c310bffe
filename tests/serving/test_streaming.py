"""Handles: tokens and text as they come, from any thread."""

import threading

import pytest
import served

NEW = 10
GREEDY = {"max_new_tokens": NEW, "stop_tokens": ()}


def test_tokens_come_one_by_one_while_others_go_on():
    engine = served.engine()
    wanted = served.wanted("llama", NEW)
    first, second = (engine.submit(prompt, **GREEDY) for prompt in served.prompts()[:2])
    seen = []
    for token in first:
        seen.append(token)
        assert len(seen) - 1 <= first.statistics.new_tokens <= len(seen)
    assert seen == wanted[0]
    assert second.statistics.new_tokens > NEW // 2  # it wrote beside the first
    assert list(second) == list(second.tokens()) == wanted[1]
    with pytest.raises(ValueError, match="tokenizer: got None"):
        next(second.texts())


def test_text_comes_in_pieces():
    tokenizer = served.LetterTokenizer()
    engine = served.engine(tokenizer=tokenizer)
    prompt = served.prompts()[1]
    whole = tokenizer.decode(served.uncached("llama", tuple(prompt), NEW))
    completion = engine.submit(prompt, **GREEDY)
    pieces = list(completion)
    assert "".join(pieces) == whole == completion.result().text
    assert len(pieces) > NEW // 2
    assert engine.submit(tokenizer.decode(prompt), **GREEDY).result().text == whole


def test_stop_strings_end_a_request_before_them():
    tokenizer = served.LetterTokenizer()
    engine = served.engine(tokenizer=tokenizer)
    prompt = served.prompts()[1]
    whole = tokenizer.decode(served.uncached("llama", tuple(prompt), NEW))
    stop = whole[4:7]
    completion = engine.submit(prompt, stop=["never", stop], **GREEDY)
    assert "".join(completion) == whole[: whole.index(stop)]
    found = completion.result()
    assert found.reason == "stop_string" and found.text == whole[: whole.index(stop)]
    assert len(found.tokens) == whole.index(stop) + 3
    served.assert_nothing_is_held(engine)


def test_a_stop_string_before_an_unfinished_character_is_the_reason():
    """It is found when no token comes any more that could finish the character."""

    class Unfinished(served.LetterTokenizer):
        def decode(self, token_ids, skip_special_tokens=False):
            return super().decode(token_ids, skip_special_tokens) + "\ufffd" * bool(token_ids)

    engine = served.engine(tokenizer=Unfinished())
    prompt = served.prompts()[1]
    whole = served.LetterTokenizer().decode(served.uncached("llama", tuple(prompt), NEW))
    found = engine.submit(prompt, stop=whole[4:7], **GREEDY).result()
    assert found.reason == "stop_string" and found.text == whole[: whole.index(whole[4:7])]


def test_threads_submit_and_wait_side_by_side():
    engine = served.engine(num_pages=13)
    prompts, wanted = served.prompts(), served.wanted("llama", NEW)
    found = [[]] * len(prompts)

    def serve(number):
        found[number] = list(engine.submit(prompts[number], **GREEDY).tokens())

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == wanted
    served.assert_nothing_is_held(engine)


def test_a_loop_in_one_thread_serves_the_others():
    engine = served.engine()
    prompt = served.prompts()[0]
    end = threading.Event()

    def loop():
        while not end.is_set():
            engine.run()

    thread = threading.Thread(target=loop)
    thread.start()
    completions = [engine.submit(prompt, **GREEDY) for _ in range(5)]
    while not all(completion.done for completion in completions):
        end.wait(0.01)
    end.set()
    thread.join(60)
    wanted = served.uncached("llama", tuple(prompt), NEW)
    assert [completion.result().tokens for completion in completions] == [wanted] * 5
