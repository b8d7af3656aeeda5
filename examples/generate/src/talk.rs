//! `--chat`: questions from standard input, and answers.

use std::io::{IsTerminal, stdin};
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::{
    Chat, ChatTemplate, Checkpoint, Conversation, Error, Generation, Options, Result, Setup, Stops, Text,
    Thinking,
};

use crate::args::{Args, ChatArgs, Think};
use crate::print::{say, tell};
use crate::program::Device;
use crate::{interrupts, losses};

/// Tokens of a conversation, unless they are given or the model has fewer positions.
const CONTEXT: usize = 8192;

pub fn chat(args: &Args, given: &ChatArgs, device: Device<'_>) -> Result<()> {
    let begin = Instant::now();
    let config = crate::program::opened(args)?;
    let text = Text::open_with(&args.dir, args.tokenizer.as_deref())?;
    let template = ChatTemplate::open(&args.dir, given.template.as_deref())?;
    let think = (given.think == Think::Off).then_some(false);
    let chat = || Chat::new(&text, &template, given.system.as_deref(), think);
    let context = given.context.unwrap_or(CONTEXT).min(config.max_position_embeddings);
    // What the template refuses is known before the weights are read.
    let first = chat().ask(args.prompts.first().map_or("?", String::as_str))?;
    room(context, &first)?;
    let checkpoint = Checkpoint::open(&args.dir)?;
    let tokens = context as u32;
    let prompt_tokens = first.len() as u32;
    let setup =
        Setup { tokens, prompt_tokens, positions: tokens, ..crate::program::setup(args, &checkpoint)? };
    let mut attention = crate::program::loaded(args, device, &checkpoint, &setup)?;
    crate::program::ready(&checkpoint, &setup, attention.as_mut(), begin)?;

    let sampling = args.sampling(&Generation::open(&args.dir)?);
    let ends: Vec<u32> = text.eos.into_iter().collect();
    let (mut chat, mut conversation) = (chat(), Conversation::default());
    let mut questions = Questions::new(&args.prompts);
    while let Some(question) = questions.next()? {
        let prompt = chat.ask(&question)?;
        let room = room(context, &prompt)?;
        let options = Options { max_tokens: args.max_tokens.unwrap_or(usize::MAX).min(room), sampling };
        let mut answer = Answer::new(&text, args, given, chat.prompt());
        interrupts::begin();
        let mut on = |token: Option<u32>| {
            let is_stopped = token.map(|token| answer.add(token)).transpose()?.unwrap_or(false);
            let is_over = is_stopped || interrupts::count() > 0;
            Ok(if is_over { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        let (model, attention) = (&checkpoint.model, attention.as_mut());
        let tokens = conversation.answer(model, attention, &prompt, (&options, &ends), &mut on);
        let interrupted = interrupts::end();
        let (tokens, content) = (tokens?, answer.finish()?);
        if interrupted > 0 {
            tell("[stopped]\n");
        }
        if interrupted > 1 {
            break;
        }
        chat.answered(prompt, &tokens, content)?;
    }
    crate::program::summarise(&conversation.stats, conversation.answers(), attention.as_ref());
    losses::print(attention.as_mut())
}

/// Tokens that an answer may have.
fn room(context: usize, prompt: &[u32]) -> Result<usize> {
    let tokens = prompt.len();
    if tokens < context {
        return Ok(context - tokens);
    }
    let why = format!("the conversation has {tokens} tokens, and room is for {context}");
    let cure = "begin another, or give a larger --context where the model has more";
    Err(Error::Input(format!("{why}: {cure}")))
}

/// The text of an answer while it is being written.
struct Answer<'a> {
    stream: Box<dyn FnMut(u32) -> Result<String> + 'a>,
    stops: Stops,
    /// Leaves out what was reasoned.
    hide: Option<Thinking>,
    content: String,
}

impl<'a> Answer<'a> {
    fn new(text: &'a Text, args: &Args, given: &ChatArgs, prompt: &str) -> Self {
        Self {
            stream: Box::new(text.stream()),
            stops: Stops::new(&args.stops),
            hide: (given.think == Think::Hide).then(|| Thinking::after(prompt)),
            content: String::new(),
        }
    }

    /// Writes a token's text. Gives whether a stop ends the answer.
    fn add(&mut self, token: u32) -> Result<bool> {
        let text = (self.stream)(token)?;
        let (text, is_stopped) = self.stops.push(&text);
        self.write(text)?;
        Ok(is_stopped)
    }

    fn write(&mut self, text: String) -> Result<()> {
        self.content += &text;
        say(&match &mut self.hide {
            Some(hide) => hide.push(&text),
            None => text,
        })
    }

    /// All of its text.
    fn finish(mut self) -> Result<String> {
        let rest = self.stops.rest();
        self.write(rest)?;
        let rest = self.hide.as_mut().map(Thinking::rest).unwrap_or_default();
        say(&(rest + "\n"))?;
        Ok(self.content)
    }
}

/// What comes while no answer is being written.
enum Event {
    Line(String),
    Interrupted,
}

/// The questions of the command line, then the lines of standard input, which a thread reads, as Ctrl-C does not wake who waits for them.
struct Questions {
    given: std::vec::IntoIter<String>,
    events: Receiver<Event>,
    is_terminal: bool,
}

impl Questions {
    fn new(given: &[String]) -> Self {
        let (sender, events) = channel();
        let of_interrupts = sender.clone();
        interrupts::catch(3, move || drop(of_interrupts.send(Event::Interrupted)));
        let given: Vec<String> = given.into();
        std::thread::spawn(move || read(&sender));
        Self { given: given.into_iter(), events, is_terminal: stdin().is_terminal() }
    }

    /// The next one; `None` at the end of the input and after Ctrl-C.
    fn next(&mut self) -> Result<Option<String>> {
        if let Some(given) = self.given.next() {
            return Ok(Some(given));
        }
        loop {
            if self.is_terminal {
                tell("> ");
            }
            match self.events.recv() {
                Ok(Event::Line(line)) if line.is_empty() => return Ok(None),
                Ok(Event::Line(line)) if line.trim().is_empty() => continue,
                Ok(Event::Line(line)) => return Ok(Some(line.trim_end_matches(['\n', '\r']).into())),
                Ok(Event::Interrupted) | Err(_) => return Ok(None),
            }
        }
    }
}

/// Sends lines, and an empty one, without even its newline, at the end.
fn read(sender: &Sender<Event>) {
    loop {
        let mut line = String::new();
        let is_over = match stdin().read_line(&mut line) {
            Ok(bytes) => bytes == 0,
            Err(error) => {
                tell(&format!("standard input: {error}\n"));
                true
            }
        };
        if sender.send(Event::Line(if is_over { String::new() } else { line })).is_err() || is_over {
            return;
        }
    }
}
