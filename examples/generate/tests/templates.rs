//! Chat templates: each conversation is the text that transformers makes of it.

mod common;

use generate::{ChatTemplate, Message};
use serde_json::Value;

#[test]
fn texts_are_those_of_transformers() {
    let goldens = std::fs::read_to_string(common::path("tests/chat/goldens.json")).expect("goldens");
    // The order of fields is that of the file.
    let variables: Vec<&str> = raw_conversations(&goldens);
    let goldens: Value = serde_json::from_str(&goldens).expect("goldens");
    let special = goldens["special"].as_object().expect("tokens");
    let special: Vec<_> =
        special.iter().map(|(name, token)| (name.as_str(), token.as_str().expect("a token"))).collect();
    let all = goldens["goldens"].as_object().expect("templates");
    assert_eq!(all.len(), 7);
    let (mut texts, mut errors) = (0, 0);
    for (name, wanted) in all {
        let template =
            std::fs::read_to_string(common::path(&format!("tests/chat/{name}.jinja"))).expect("a template");
        let template = ChatTemplate::parse(&template, &special).expect(name);
        let wanted = wanted.as_array().expect("a list");
        assert!(wanted.len() >= 10 && wanted.len() == variables.len());
        for (index, (variables, want)) in variables.iter().zip(wanted).enumerate() {
            match (template.render_json(variables), want["text"].as_str(), want["error"].as_str()) {
                (Ok(got), Some(want), _) => {
                    assert_eq!(got, want, "{name}, conversation {index}");
                    texts += 1;
                }
                (Err(got), _, Some(want)) => {
                    let got = got.to_string();
                    assert!(got.contains(want), "{name}, conversation {index}: {got}\nlacks {want}");
                    errors += 1;
                }
                (got, ..) => panic!("{name}, conversation {index}: {got:?}, not {want}"),
            }
        }
    }
    assert_eq!((texts, errors), (82, 2));
}

/// The objects of the list `conversations` as they are written.
fn raw_conversations(goldens: &str) -> Vec<&str> {
    #[derive(serde::Deserialize)]
    struct Raw<'a> {
        #[serde(borrow)]
        conversations: Vec<&'a serde_json::value::RawValue>,
    }
    let raw: Raw<'_> = serde_json::from_str(goldens).expect("goldens");
    raw.conversations.into_iter().map(serde_json::value::RawValue::get).collect()
}

#[test]
fn what_cannot_be_used_is_an_error() {
    let question = [Message { role: "user", content: "x".into() }];
    for (template, why) in [
        ("{% if %}", "chat template: syntax error"),
        ("{% for x in range(90000) %}{% for y in range(90000) %}{% endfor %}{% endfor %}", "fuel"),
        ("{{ missing.field }}", "undefined"),
        ("{{ raise_exception('Not so.') }}", "chat template: Not so."),
        ("{{ messages | nothing }}", "nothing"),
        ("{% include 'other' %}", "other"),
    ] {
        let rendered = ChatTemplate::parse(template, &[]).and_then(|it| it.render(&question, None));
        let error = rendered.expect_err(template).to_string();
        assert!(error.contains(why), "{template}: {error}");
    }
}
