use std::path::Path;

/// The result of a fallible call of this package.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What was wrong, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of a checkpoint, or text, that cannot be used.
    #[error("{path}: {why}")]
    File { path: String, why: String },
    /// A prompt or an option that cannot be served.
    #[error("{0}")]
    Input(String),
    /// Standard output, such as one that was closed.
    #[error("standard output: {0}")]
    Output(std::io::Error),
    /// From the attention.
    #[error(transparent)]
    Mla(#[from] wgpu_mla::Error),
    /// From an engine that computes whole layers on a device.
    #[error("{0}")]
    Engine(String),
    /// From candle.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// A file at fault.
    pub fn file(path: &Path, why: impl ToString) -> Self {
        Self::File { path: path.display().to_string(), why: why.to_string() }
    }
}
