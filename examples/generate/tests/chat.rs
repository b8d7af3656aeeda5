//! Conversations over one cache, and what is put around a text.

mod common;

use std::ops::ControlFlow;

use generate::{Chat, ChatTemplate, Checkpoint, Conversation, Options, Sampling, Setup, Stats, Text, Where};
use wgpu_mla::Dtype;

const TEMPLATE: &str = "{% for m in messages %}{{ m.role | upper }}:
{{ m.content }}<|end|>{% endfor %}ASSISTANT:{{ '\n' }}";

fn setup() -> Setup {
    Setup { backend: Where::Cpu, kv: Dtype::F32.into(), page_size: 16, step_tokens: 24, ..Setup::default() }
}

/// What a run of its own makes of a prompt.
fn alone(checkpoint: &Checkpoint, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut attention = generate::paged(&checkpoint.model, &setup()).expect("an attention");
    let options = Options { max_tokens, sampling: Sampling::default() };
    let prompts = [prompt.to_vec()];
    let done =
        generate::generate(&checkpoint.model, attention.as_mut(), &prompts, &options, &mut |_, _| Ok(()));
    done.expect("a run").tokens.remove(0)
}

/// A question that goes on from the conversation is computed from there, and one that does not from where they part.
#[test]
fn what_is_in_the_cache_is_not_computed_again() {
    let checkpoint = common::checkpoint("model");
    let text = checkpoint.tokenizer().expect("a tokenizer");
    let mut attention = generate::paged(&checkpoint.model, &setup()).expect("an attention");
    let mut conversation = Conversation::default();
    let options = Options { max_tokens: 20, sampling: Sampling::default() };
    let first =
        text.encode("First Citizen:\nGood morrow, neighbour. Have you heard the news?\n").expect("tokens");
    let more =
        text.encode("\nKING HENRY:\nWhat news of the wars in France, and of my son?\n").expect("tokens");
    let mut prompt = first.clone();
    let (mut kept, mut computed) = (0, 0);
    for turn in 0..4 {
        let before = conversation.tokens().len();
        let mut on = |_| Ok(ControlFlow::Continue(()));
        let answer = conversation
            .answer(&checkpoint.model, attention.as_mut(), &prompt, (&options, &[]), &mut on)
            .expect("an answer");
        assert_eq!(answer, alone(&checkpoint, &prompt, 20), "turn {turn}");
        let shared = if turn == 3 { 10 } else { before };
        (kept, computed) = (kept + shared, computed + prompt.len() - shared);
        let Stats { kept_tokens, prefill_tokens, prompt_tokens, .. } = conversation.stats;
        assert_eq!(
            (kept_tokens, prefill_tokens, prompt_tokens),
            (kept, computed, kept + computed),
            "turn {turn}"
        );
        // All but the last token of the answer, which nothing came after.
        assert_eq!(conversation.tokens().len(), prompt.len() + answer.len() - 1);
        match turn {
            2 => prompt = [&first[..10], &more].concat(),
            _ => prompt.extend(answer.iter().chain(&more)),
        }
    }
    let used = attention.pages().used().0 as usize;
    assert_eq!(used, conversation.tokens().len().div_ceil(16), "pages of what was left are free");
}

#[test]
fn an_answer_ends_where_it_is_told() {
    let checkpoint = common::checkpoint("model");
    let text = checkpoint.tokenizer().expect("a tokenizer");
    let mut attention = generate::paged(&checkpoint.model, &setup()).expect("an attention");
    let prompt = text
        .encode("KING HENRY:\nWhat news of the wars in France, and of my son, good lord of York?\n")
        .expect("tokens");
    assert!(prompt.len() > 24, "several steps");
    let options = Options { max_tokens: 20, sampling: Sampling::default() };
    let want = alone(&checkpoint, &prompt, 20);
    let mut conversation = Conversation::default();
    let mut answer = |ends: &[u32], on: &mut dyn FnMut(Option<u32>) -> ControlFlow<()>| {
        let mut on = |token| Ok(on(token));
        let answer =
            conversation.answer(&checkpoint.model, attention.as_mut(), &prompt, (&options, ends), &mut on);
        (answer.expect("an answer"), conversation.tokens().len())
    };
    let go_on = ControlFlow::Continue(());
    // Between the steps of the prompt.
    let mut steps = 0;
    let (none, cached) = answer(&[], &mut |_| {
        steps += 1;
        if steps == 2 { ControlFlow::Break(()) } else { go_on }
    });
    assert_eq!((none, cached), (Vec::new(), 24));
    let first = want.iter().position(|token| *token == want[5]).expect("it is there");
    assert_eq!(answer(&[want[5]], &mut |_| go_on).0, want[..first]);
    let mut left = 3;
    let (three, _) = answer(&[], &mut |token| {
        left -= usize::from(token.is_some());
        if left == 0 { ControlFlow::Break(()) } else { go_on }
    });
    assert_eq!(three, want[..3]);
    assert_eq!(answer(&[], &mut |_| go_on).0, want);
}

/// The tokens of an answer stay those that the model chose, however its text would be split; where the template changes what was said, all
/// is split anew.
#[test]
fn turns_become_tokens() {
    let text = common::checkpoint("model").tokenizer().expect("a tokenizer");
    let template = ChatTemplate::parse(TEMPLATE, &[]).expect("a template");
    let mut chat = Chat::new(&text, &template, Some("Be brief."), None);
    let prompt = chat.ask("Who?").expect("tokens");
    assert_eq!(chat.prompt(), "SYSTEM:\nBe brief.<|end|>USER:\nWho?<|end|>ASSISTANT:\n");
    assert_eq!(prompt, text.encode_only(chat.prompt()).expect("tokens"));
    // Letter by letter, as no text is split.
    let answer: Vec<u32> =
        "the".chars().flat_map(|c| text.encode_only(&c.to_string()).expect("a token")).collect();
    assert_ne!(text.encode_only("the").expect("tokens"), answer);
    chat.answered(prompt.clone(), &answer, "the".into()).expect("a turn");
    let next = chat.ask("You?").expect("tokens");
    let rest = text.encode_only("<|end|>USER:\nYou?<|end|>ASSISTANT:\n").expect("tokens");
    assert_eq!(next, [&prompt[..], &answer, &rest].concat());
    // Only a part of the answer counts.
    chat.answered(next, &answer, "t".into()).expect("a turn");
    let next = chat.ask("And?").expect("tokens");
    assert!(chat.prompt().ends_with("ASSISTANT:\nt<|end|>USER:\nAnd?<|end|>ASSISTANT:\n"));
    assert_eq!(next, text.encode_only(chat.prompt()).expect("tokens"));
    // What comes after this answer could be one token with its end.
    let open = ChatTemplate::parse(&TEMPLATE.replace("<|end|>", " "), &[]).expect("a template");
    let mut chat = Chat::new(&text, &open, None, None);
    let prompt = chat.ask("Who?").expect("tokens");
    chat.answered(prompt, &answer, "the".into()).expect("a turn");
    let next = chat.ask("You?").expect("tokens");
    assert_eq!(next, text.encode_only(chat.prompt()).expect("tokens"));
}

#[test]
fn what_is_around_a_text() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("around");
    std::fs::create_dir_all(&dir).expect("a folder");
    std::fs::copy(common::path("model/tokenizer.json"), dir.join("tokenizer.json")).expect("a copy");
    let encoded = |config: &str, of: &str| {
        std::fs::write(dir.join("tokenizer_config.json"), config).expect("a file");
        Text::open(&dir).expect("a tokenizer").encode(of).expect("tokens")
    };
    let plain = encoded("{}", "ROMEO:");
    let [with_bos, with_eos] = [[&[0], &plain[..]].concat(), [&plain[..], &[0]].concat()];
    for (flags, want) in [
        (r#""add_bos_token": true"#, &with_bos),
        (r#""add_bos_token": false"#, &plain),
        (r#""add_eos_token": true"#, &with_eos),
        (r#""x": 1"#, &plain),
    ] {
        let config = format!(r#"{{"bos_token": "<|end|>", "eos_token": {{"content": "<|end|>"}}, {flags}}}"#);
        assert_eq!(encoded(&config, "ROMEO:"), *want, "{flags}");
    }
    let config = r#"{"bos_token": "<|end|>", "add_bos_token": true}"#;
    assert_eq!(encoded(config, "<|end|>ROMEO:"), with_bos, "it is there already");
    assert!(encoded(config, "").is_empty());
    assert_eq!(encoded(r#"{"add_bos_token": true}"#, "ROMEO:"), plain, "there is no such token");
}
