//! `aenv-blockd`: see the library.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
