from dataclasses import replace

from made_batches import make_batch, make_group

from gspo.train.record import _example


def test_the_example_of_the_display_is_the_question_not_the_end_of_a_chat_template():
    plain = make_group(0, [1, 0])
    chat = replace(plain.prompt, text="<user>2+2?<assistant>", messages=({"role": "user", "content": "2+2?"},))
    assert _example(make_batch([replace(plain, prompt=chat)])) == ("2+2?", "", True)
    assert _example(make_batch([plain])) == ("?", "", True)
