//! Chat templates: a conversation as the text that the model was trained to continue. They are Jinja, written for transformers, whose
//! functions and settings they have here too.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, ErrorKind, State, Value, context};

use crate::python::{self, Json};
use crate::tokenizer_config::TokenizerConfig;
use crate::{Error, Result, files};

/// A turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    pub content: String,
}

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Where it is from, for errors.
    from: String,
    /// `bos_token` and the like.
    special: Value,
}

/// The only template of an environment.
const NAME: &str = "chat";

/// Steps that a template may take: it comes from anywhere, and may loop.
const FUEL: u64 = 10_000_000;

impl ChatTemplate {
    /// The template of a checkpoint: `chat_template.jinja`, or else that of `tokenizer_config.json`; `given` is another file.
    ///
    /// # Errors
    /// [`Error::File`] where there is none, or one that is malformed.
    pub fn open(dir: &Path, given: Option<&Path>) -> Result<Self> {
        let config = TokenizerConfig::open(dir)?;
        let own = dir.join("chat_template.jinja");
        let file = match given {
            Some(given) => Some(given),
            None => files::is_there(&own)?.then_some(own.as_path()),
        };
        let (path, text) = match (file, &config.chat_template) {
            (Some(file), _) => (file.to_owned(), files::read_text(file, "name a file of a chat template")?),
            (None, Some(text)) => (dir.join("tokenizer_config.json"), text.clone()),
            (None, None) => {
                let cure = "take a checkpoint that was trained for chats, or name one with --chat-template";
                return Err(Error::file(
                    dir,
                    format!("no chat_template.jinja, and none in tokenizer_config.json; {cure}"),
                ));
            }
        };
        Self::new(&text, &config).map_err(|why| Error::file(&path, format!("chat template: {why}")))
    }

    fn new(text: &str, config: &TokenizerConfig) -> Result<Self, String> {
        let mut environment = environment();
        let text = without_generation_tags(text);
        environment.add_template_owned(NAME, text).map_err(|error| why(&error))?;
        let special = Value::from_pairs(config.special.clone());
        Ok(Self { environment, from: "chat template".into(), special })
    }

    /// A template from its text, with special tokens by the names that it knows them by, such as `bos_token`.
    ///
    /// # Errors
    /// [`Error::Input`] for one that is malformed.
    pub fn parse(text: &str, special: &[(&str, &str)]) -> Result<Self> {
        let special = special.iter().map(|(name, token)| ((*name).into(), (*token).into())).collect();
        let config = TokenizerConfig { special, ..TokenizerConfig::default() };
        Self::new(text, &config).map_err(|why| Error::Input(format!("chat template: {why}")))
    }

    /// The text up to where the next answer begins. `think` is whether the model is to reason first, where its template asks.
    ///
    /// # Errors
    /// [`Error::Input`] for a conversation that the template refuses.
    pub fn render(&self, messages: &[Message], think: Option<bool>) -> Result<String> {
        let none = Value::from(());
        let message = |it: &Message| Value::from_pairs([("role", it.role), ("content", &it.content)]);
        let variables = context! {
            messages => messages.iter().map(message).collect::<Vec<_>>(),
            tools => none.clone(),
            documents => none,
            add_generation_prompt => true,
        };
        match think {
            None => self.render_with(variables),
            // The names that models have for it.
            Some(think) => {
                self.render_with(context! { enable_thinking => think, thinking => think, ..variables })
            }
        }
    }

    /// The same from all variables in JSON: `messages`, and what else the template knows.
    ///
    /// # Errors
    /// [`Error::Input`].
    pub fn render_json(&self, variables: &str) -> Result<String> {
        let variables = serde_json::from_str(variables);
        self.render_with(variables.map_err(|error| Error::Input(format!("{}: {error}", self.from)))?)
    }

    fn render_with(&self, variables: Value) -> Result<String> {
        let all = context! { ..variables, ..self.special.clone() };
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render(all));
        rendered.map_err(|error| Error::Input(format!("{}: {}", self.from, why(&error))))
    }
}

/// The settings and functions that transformers gives Jinja.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(python_method);
    environment.set_formatter(|out, _, value| Ok(out.write_str(&python::text(value))?));
    environment.add_filter("string", |value: Value| python::text(&value));
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |why: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
    });
    environment.add_function("strftime_now", |format: String| python::strftime_now(&format));
    // In Python strings and maps have items and a length too.
    let has_items = |value: &Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        (matches!(value.kind(), String | Seq | Map | Undefined), value.kind() == Iterable)
    };
    environment.add_test("sequence", move |value: Value| has_items(&value).0);
    environment.add_test("iterable", move |value: Value| {
        let (sequence, iterable) = has_items(&value);
        sequence || iterable
    });
    environment
}

/// Methods of Python's values. Those of strings that the library lacks, or has otherwise, are here.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, minijinja::Error> {
    match (value.as_str(), method, args.first().and_then(Value::as_str)) {
        (Some(text), "title", None) => Ok(python::title(text).into()),
        (Some(text), "removeprefix", Some(part)) => Ok(text.strip_prefix(part).unwrap_or(text).into()),
        (Some(text), "removesuffix", Some(part)) => Ok(text.strip_suffix(part).unwrap_or(text).into()),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn to_json(value: Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.filter(|it| !it.is_none()).map(|it| match usize::try_from(it.clone()) {
        Ok(count) => " ".repeat(count.min(64)),
        Err(_) => python::text(&it),
    });
    // Python leaves no space before the end of a line.
    let between = if indent.is_some() { "," } else { ", " };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.as_deref() {
        Some([items, keys]) => (items.clone(), keys.clone()),
        _ => (between.into(), ": ".into()),
    };
    let json = Json {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        separators,
    };
    options.assert_all_used()?;
    json.dumps(&value).map_err(|why| minijinja::Error::new(ErrorKind::InvalidOperation, why))
}

/// What a template says, with the line, without what the engine adds.
fn why(error: &minijinja::Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), Into::into);
    match (error.kind(), error.line()) {
        (ErrorKind::InvalidOperation, _) | (_, None) => what,
        (kind, Some(line)) => format!("{kind}: {what} (line {line})"),
    }
}

/// transformers marks what assistants say with `{% generation %}`, a tag of its own, which changes nothing in the text.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find("{%") {
        let (before, tag) = rest.split_at(begin);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let name = tag[2..end].trim_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag.replacen(name, "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen(name, "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}
