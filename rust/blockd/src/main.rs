//! `aenv-blockd`: see the library.

use std::process::ExitCode;

use blockd::daemon::{self, Options};
use blockd::memory;

fn main() -> ExitCode {
    memory::set_up();
    let options = match Options::parse(std::env::args_os().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{}", daemon::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("aenv-blockd: {error}\n{}", daemon::USAGE);
            return ExitCode::from(2);
        }
    };
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .with_env_var("AENV_BLOCKD_LOG")
        .from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match daemon::run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(code = ?error.code, "{error}");
            ExitCode::FAILURE
        }
    }
}
